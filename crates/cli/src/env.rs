//! Every environment variable that SPACE reads, in one place. Nothing else in the crate may read one by another name;
//! `docs/operations.md` must name each.

pub struct Variable {
    pub name: &'static str,
    pub meaning: &'static str,
}

macro_rules! variables {
    ($($ident:ident = $name:literal, $meaning:literal;)*) => {
        $(pub const $ident: &str = $name;)*
        pub const ALL: &[Variable] = &[$(Variable { name: $name, meaning: $meaning }),*];
    };
}

variables! {
    URL = "SPACE_URL", "address of the server for client commands";
    API_KEY = "SPACE_API_KEY", "API key for client commands";
    CONFIG = "SPACE_CONFIG", "configuration file instead of ./space.toml and /etc/space/space.toml";
    DATA_DIR = "SPACE_DATA_DIR", "data folder (data_dir)";
    LISTEN = "SPACE_LISTEN", "address of the API (listen)";
    DATA_LISTEN = "SPACE_DATA_LISTEN", "address of the data plane (data_listen)";
    HOSTD = "SPACE_HOSTD", "absolute path of space-hostd, instead of the one beside space";
    LOG = "SPACE_LOG", "log filter, as in info or space_node=debug (log)";
    LOG_FORMAT = "SPACE_LOG_FORMAT", "text or json (log_format)";
    POOL_SIZE = "SPACE_POOL_SIZE", "size of the pool file (pool.size)";
    POOL_DEVICE = "SPACE_POOL_DEVICE", "block device of the pool (pool.device)";
    POOL_PATH = "SPACE_POOL_PATH", "folder on an existing btrfs as the pool (pool.path)";
    VMM_DRIVER = "SPACE_VMM_DRIVER", "auto, firecracker, qemu, qemu-tcg or qemu-kvm (vmm.driver)";
    VMM_PROGRAM = "SPACE_VMM_PROGRAM", "absolute path of the VMM (vmm.program)";
    VMM_KERNEL = "SPACE_VMM_KERNEL", "guest kernel, a folder or a vmlinux (vmm.kernel)";
    VMM_KERNEL_ARGS = "SPACE_VMM_KERNEL_ARGS", "more kernel command line (vmm.kernel_args)";
    VMM_CORE_SCHEDULING = "SPACE_VMM_CORE_SCHEDULING", "on: no two VMs on the threads of one core (vmm.core_scheduling)";
    WARM_PER_TEMPLATE = "SPACE_WARM_PER_TEMPLATE", "parked VMs of each template: auto or a number (warm.per_template)";
    LIMITS_MEMORY = "SPACE_LIMITS_MEMORY", "memory that sandboxes may use together (limits.memory)";
    LIMITS_SANDBOXES = "SPACE_LIMITS_SANDBOXES", "sandboxes at the same time (limits.sandboxes)";
    DRILL = "SPACE_DRILL", "tests only: a file that names the point where a process of the server dies";
    NO_COLOR = "NO_COLOR", "any value: no colours";
    TERM = "TERM", "passed to programs that get a terminal";
}

/// Its value, when it is set and not empty. A value that is not UTF-8 counts as not set.
pub fn get(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
