"""User code: ``training.code_ref`` names a function that returns a ``Workload``.

    my_package.task:make@sha256:<digest>                        an installed module
    file:///srv/tasks@sha256:<digest>#task:make                 a directory
    git+https://host/repository.git@<40 hex digits>#task:make   a commit

Every reference is pinned and its source must be listed in ``security.code_sources``; both are
checked before any of it runs. The function is called with a ``Task`` and returns the workload.

What is guarded: which code runs (allow-list and pin), changes to it (the digest is checked at each
load), and its environment (an allow-list of variables, no credentials). What is NOT guarded: the
code runs in the rank's process and as its user. It can read that user's files, including the state
directory's runtime.json with the S3 credentials of the ranks; open connections; this process's
memory; and /proc/PID/environ of processes that were started with more. A source that is not trusted
with the bucket does not belong on the allow-list; ranks that must not read more get credentials of
their own.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
