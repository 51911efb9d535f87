from .cgroup import (
    free_memory_bytes as free_memory_bytes,
    usable_cores as usable_cores,
    usable_memory_bytes as usable_memory_bytes,
)
from .files import (
    PRIVATE_DIRECTORY as PRIVATE_DIRECTORY,
    create_durably as create_durably,
    ensure_own_directory as ensure_own_directory,
    ensure_private as ensure_private,
    make_directories as make_directories,
    restrict_directory as restrict_directory,
    sync_directories as sync_directories,
    sync_directory as sync_directory,
    sync_tree as sync_tree,
    write_durably as write_durably,
    write_private as write_private,
)
from .http import (
    Endpoint as Endpoint,
    HttpServer as HttpServer,
    Response as Response,
    basic_authorization as basic_authorization,
    fetch as fetch,
    is_loopback as is_loopback,
)
from .machine import (
    gpus as gpus,
    interface_mbit as interface_mbit,
    interface_to as interface_to,
    processor as processor,
    write_bytes_s as write_bytes_s,
)
from .processes import (
    PYTHON as PYTHON,
    is_readable as is_readable,
    is_writable as is_writable,
    own_program as own_program,
    process_holding as process_holding,
    without_proxy_to_loopback as without_proxy_to_loopback,
)
