/* A wall clock that jumps when told to: preloaded into a process, it adds the seconds that stand in
 * a mapped file to every reading of the real time. Monotonic clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *jump_s;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_jump(void)
{
    const char *path = getenv("PACELINE_TEST_WALL_JUMP");
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (path) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        void *page = mmap(NULL, sizeof *jump_s, PROT_READ, MAP_SHARED, fd, 0);
        if (fd >= 0 && page != MAP_FAILED)
            jump_s = page;
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed;
    if (!real_clock_gettime)
        real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    failed = real_clock_gettime(clock, now);
    if (!failed && jump_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *jump_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept)
        *kept = now.tv_sec;
    return now.tv_sec;
}
