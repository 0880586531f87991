//! Every bound of the system, in one place, with its unit in the name. Exceeding one is a typed error where it happens.

/// Names of sandboxes and tags; also a host name label, hence 63.
pub const NAME_MAX_BYTES: usize = 63;
pub const METADATA_KEYS_MAX: usize = 64;
pub const METADATA_KEY_MAX_BYTES: usize = 128;
pub const METADATA_VALUE_MAX_BYTES: usize = 1024;

pub const ENV_VARS_MAX: usize = 256;
pub const ENV_TOTAL_MAX_BYTES: usize = 128 * 1024;
pub const ARGV_MAX: usize = 4096;
pub const ARGV_TOTAL_MAX_BYTES: usize = 128 * 1024;
/// As Linux has it.
pub const PATH_MAX_BYTES: usize = 4095;
pub const PATH_COMPONENT_MAX_BYTES: usize = 255;

/// JSON bodies of the API. Files are streamed and have no such bound.
pub const JSON_BODY_MAX_BYTES: usize = 1024 * 1024;
pub const PAGE_MAX: u32 = 200;
pub const PAGE_DEFAULT: u32 = 50;
pub const WAIT_MAX_SECONDS: u64 = 300;
pub const IDEMPOTENCY_KEY_MAX_BYTES: usize = 255;
/// How long the answer to an idempotency key is kept.
pub const IDEMPOTENCY_KEEP_SECONDS: i64 = 24 * 3600;

pub const MEMORY_MIN_MIB: u32 = 128;
pub const MEMORY_MAX_MIB: u32 = 64 * 1024;
pub const MEMORY_DEFAULT_MIB: u32 = 512;
pub const VCPUS_MAX: u32 = 32;
pub const VCPUS_DEFAULT: u32 = 1;
pub const DISK_MIN_BYTES: u64 = 64 * 1024 * 1024;
pub const DISK_MAX_BYTES: u64 = 1024 * 1024 * 1024 * 1024;
pub const DISK_DEFAULT_BYTES: u64 = 2 * 1024 * 1024 * 1024;

pub const TTL_MIN_SECONDS: u64 = 1;
pub const TTL_MAX_SECONDS: u64 = 365 * 24 * 3600;

/// One message of a guest channel or of the node interface.
pub const GRPC_MESSAGE_MAX_BYTES: usize = 4 * 1024 * 1024;
pub const STREAM_CHUNK_BYTES: usize = 64 * 1024;

/// An attach token works this long; the session itself lives on.
pub const ATTACH_TOKEN_SECONDS: u64 = 300;
/// A reserved process that nobody attached to is forgotten after this.
pub const RESERVATION_SECONDS: u64 = 120;
/// An exit status can be read this long after the end.
pub const EXIT_KEPT_SECONDS: u64 = 600;
pub const CONSOLE_MAX_BYTES: usize = 1024 * 1024;

/// Creates that a node works on at the same time; more wait in line.
pub const STARTS_AT_ONCE: usize = 4;
pub const SANDBOXES_PER_NODE_MAX: usize = 1000;

const _: () = {
    assert!(STREAM_CHUNK_BYTES * 4 <= GRPC_MESSAGE_MAX_BYTES);
    assert!(PAGE_DEFAULT <= PAGE_MAX);
    assert!(MEMORY_MIN_MIB <= MEMORY_DEFAULT_MIB && MEMORY_DEFAULT_MIB <= MEMORY_MAX_MIB);
    assert!(ATTACH_TOKEN_SECONDS >= RESERVATION_SECONDS);
};
