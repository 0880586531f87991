//! What must hold for every parser of bytes that a guest, a VMM, an image, a registry or a client sends, or the node sends to
//! the root process: one function per parser, which takes any bytes and panics when a promise is broken. Not only "no
//! crash": a round trip, a bound, a folder that nothing leaves.
//!
//! The fuzzer calls these functions with what it makes up (`fuzz/`), the test `replay` with the seeds that are kept in
//! `fuzz/seeds/`. Must never write outside a temporary folder of its own, nor reach for the network.

pub mod archive;
pub mod attach;
pub mod extract;
pub mod guest;
pub mod hostd;
pub mod image;
pub mod link;
pub mod names;
pub mod records;
pub mod tarball;
pub mod vmm;

/// One parser.
pub struct Target {
    /// Of its file in `fuzz/fuzz_targets` and its folder in `fuzz/seeds`.
    pub name: &'static str,
    pub check: fn(&[u8]),
    /// Good and nearly good inputs, made by the project's own encoders: name and content.
    pub seeds: fn() -> Vec<Seed>,
}

pub type Seed = (String, Vec<u8>);

pub const TARGETS: &[Target] = &[
    Target { name: "link_frames", check: link::frames, seeds: link::frame_seeds },
    Target { name: "link_listen", check: link::listen, seeds: link::frame_seeds },
    Target { name: "link_connect", check: link::connect, seeds: link::answer_seeds },
    Target { name: "guest_messages", check: guest::messages, seeds: guest::seeds },
    Target { name: "attach_frames", check: attach::frames, seeds: attach::frame_seeds },
    Target { name: "api_bodies", check: attach::bodies, seeds: attach::body_seeds },
    Target { name: "qmp", check: vmm::qmp, seeds: vmm::qmp_seeds },
    Target { name: "firecracker", check: vmm::firecracker, seeds: vmm::firecracker_seeds },
    Target { name: "hostd_requests", check: hostd::requests, seeds: hostd::seeds },
    Target { name: "tarball", check: tarball::read, seeds: tarball::seeds },
    Target { name: "layer", check: tarball::layer, seeds: tarball::layer_seeds },
    Target { name: "extract", check: extract::extract, seeds: extract::seeds },
    Target { name: "archive", check: archive::archive, seeds: archive::seeds },
    Target { name: "oci", check: image::oci, seeds: image::oci_seeds },
    Target { name: "users", check: image::users, seeds: image::user_seeds },
    Target { name: "references", check: names::references, seeds: names::reference_seeds },
    Target { name: "token", check: names::token, seeds: names::token_seeds },
    Target { name: "records", check: records::records, seeds: records::seeds },
];

/// The check of that name.
///
/// # Panics
/// When the promise is broken, or there is no such target.
pub fn check(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("a target of that name").check)(data);
}

/// Runs one future to its end, on a clock that jumps as soon as nothing else is to be done.
fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(work)
}

fn seed(name: &str, content: impl Into<Vec<u8>>) -> Seed {
    (name.to_owned(), content.into())
}

/// The first byte chooses, the rest is the input.
fn choose(data: &[u8]) -> (usize, &[u8]) {
    data.split_first().map_or((0, data), |(first, rest)| (usize::from(*first), rest))
}
