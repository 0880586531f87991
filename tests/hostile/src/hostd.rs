//! What the node asks of the root process: packets on its socket, with descriptors.

use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::path::{Component, Path};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use space_hostd::cgroup::{Limits, Weight};
use space_hostd::pool::{Area, Pool, is_name};
use space_hostd::process::{Order, ProcessIdentity};
use space_hostd::protocol::{self, Build, FDS_MAX, HostError, MESSAGE_MAX_BYTES, Request, Start};
use space_hostd::uids::Slot;

use crate::{Seed, choose, seed};

/// A refusal says what was wrong, and not all of it.
const REFUSAL_MAX_BYTES: usize = 8 << 10;
const TOO_LONG: usize = 0x80;

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("a pair of sockets")
}

/// The packet through a real socket, with that many descriptors; all of them are closed afterwards, whatever came of it.
fn through_a_socket(packet: &[u8], count: usize) -> Option<Request> {
    let (node, root) = pair();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let numbers: Vec<RawFd> = vec![writer.as_raw_fd(); count];
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if count == 0 { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(node.as_raw_fd(), &[IoSlice::new(packet)], rights, MsgFlags::empty(), None).expect("a packet sent");
    let taken = protocol::receive::<Request>(&root).ok().flatten();
    let request = taken.map(|(request, fds)| {
        assert_eq!(fds.len(), count, "descriptors came out of nothing, or were lost");
        request
    });
    assert!(request.is_none() || count <= FDS_MAX && packet.len() <= MESSAGE_MAX_BYTES, "the bounds do not hold");
    drop((node, root, writer));
    let mut ends = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
    poll(&mut ends, PollTimeout::ZERO).expect("polled");
    assert!(ends[0].revents().is_some_and(|seen| seen.contains(PollFlags::POLLHUP)), "a descriptor was left open");
    request
}

/// What the node sends arrives as it is, with its descriptor.
fn sent_on(request: &Request) -> Request {
    let (node, root) = pair();
    let (reader, _writer) = std::io::pipe().expect("a pipe");
    protocol::send(&node, request, &[reader.into()]).expect("a packet sent");
    let (arrived, fds) = protocol::receive(&root).expect("a whole packet").expect("an open socket");
    assert_eq!(fds.len(), 1, "the descriptor was lost");
    arrived
}

/// What in it becomes a path in the pool, and what only has to be a plain name.
fn names(request: &Request) -> (Vec<(Area, &str)>, Option<&str>) {
    match request {
        Request::Create { area, name } | Request::Delete { area, name } => (vec![(*area, name)], None),
        Request::Snapshot { from, to, .. } | Request::Rename { from, to } => {
            (vec![(from.0, &from.1), (to.0, &to.1)], None)
        }
        Request::CreateGroup { name, .. }
        | Request::EndGroup { name }
        | Request::WeighGroup { name, .. }
        | Request::MemoryOfGroup { name } => (Vec::new(), Some(name)),
        Request::Start(start) => (vec![(start.area, &start.name)], Some(&start.group)),
        Request::Build(build) => (vec![(Area::Tmp, &build.name)], None),
        Request::EndBuild { name } => (name.iter().map(|name| (Area::Tmp, name.as_str())).collect(), None),
        Request::Begin
        | Request::List { .. }
        | Request::Usage
        | Request::ListGroups
        | Request::Open { .. }
        | Request::Order { .. }
        | Request::Exit { .. } => (Vec::new(), None),
    }
}

/// Below `folder` by exactly so many plain steps.
fn is_below(path: &Path, folder: &Path, steps: usize) -> bool {
    let Ok(rest) = path.strip_prefix(folder) else { return false };
    let plain = |step: Component<'_>| matches!(step, Component::Normal(_));
    rest.components().count() == steps && rest.components().all(plain) && !rest.as_os_str().is_empty()
}

fn check_refusal(refused: &HostError) {
    let answer = serde_json::to_vec(&Err::<(), _>(refused)).expect("plain data");
    assert!(answer.len() <= REFUSAL_MAX_BYTES, "a refusal of {} bytes", answer.len());
}

fn check_start(start: &Start) {
    if let Err(refused) = start.check() {
        return check_refusal(&refused);
    }
    assert!(matches!(start.area, Area::Sandboxes | Area::Tmp), "a VMM in a template");
    assert!(start.args.iter().all(|arg| !arg.contains('\0')));
    let folder = Path::new("/pool/sandboxes/one");
    for name in &start.given {
        assert!(is_below(&folder.join(name), folder, 1), "{name:?} is no file of the subvolume");
    }
}

/// A packet is a whole request within its bounds or refused, with every descriptor closed; what its names become is a
/// direct child of the folder they are meant for, and a refusal is short.
pub fn requests(data: &[u8]) {
    let (choice, packet) = choose(data);
    let mut packet = packet.to_vec();
    if choice & TOO_LONG != 0 {
        packet.resize(MESSAGE_MAX_BYTES + 1, b' ');
    }
    let Some(request) = through_a_socket(&packet, choice % (2 * FDS_MAX)) else { return };
    let own = serde_json::to_vec(&request).expect("plain data");
    assert_eq!(serde_json::to_vec(&sent_on(&request)).expect("plain data"), own);

    let pool = Pool::attach(Path::new("/pool"));
    let (in_pool, plain) = names(&request);
    for (area, name) in in_pool {
        match pool.path(area, name) {
            Ok(path) => assert!(is_below(&path, pool.root(), 2), "{} is no subvolume's place", path.display()),
            Err(error) => check_refusal(&error.into()),
        }
    }
    let group = Path::new("/group");
    assert!(plain.is_none_or(|name| !is_name(name) || is_below(&group.join(name), group, 1)));
    if let Request::Start(start) = &request {
        check_start(start);
    }
}

fn start() -> Start {
    Start {
        driver: "qemu".to_owned(),
        args: vec!["-name".to_owned(), "space".to_owned()],
        area: Area::Sandboxes,
        name: "sbx-0".to_owned(),
        slot: Slot(3),
        group: "sbx-0".to_owned(),
        boot: false,
        given: vec!["memory.img".to_owned(), "disk.img".to_owned()],
        open_files: 64,
        file_size_bytes: 1 << 30,
    }
}

pub fn seeds() -> Vec<Seed> {
    let of = |name: &str, choice: usize, request: &Request| {
        let text = serde_json::to_vec(request).expect("plain data");
        seed(name, [&[choice as u8][..], &text].concat())
    };
    let identity = ProcessIdentity { pid: 7, start_time: 9 };
    let limits = Limits { memory_bytes: 1 << 30, cpu_millis: 1000, pids: 64, weight: Weight::Normal };
    let (one, two) = ("one".to_owned(), "two".to_owned());
    let given = |name: &str| Request::Start(Start { given: vec![name.to_owned()], ..start() });
    let build = Build { name: one.clone(), network: true, packages: false };
    vec![
        of("begin", 0, &Request::Begin),
        of("create", 0, &Request::Create { area: Area::Tmp, name: one.clone() }),
        of("create_up", 0, &Request::Create { area: Area::Tmp, name: "../two".to_owned() }),
        of("create_hidden", 0, &Request::Create { area: Area::Tmp, name: ".".to_owned() }),
        of("create_long", 0, &Request::Create { area: Area::Tmp, name: "\u{202e}".repeat(5000) }),
        of(
            "snapshot",
            0,
            &Request::Snapshot { from: (Area::Templates, one.clone()), to: (Area::Tmp, two.clone()), read_only: true },
        ),
        of("rename", 0, &Request::Rename { from: (Area::Tmp, one.clone()), to: (Area::Sandboxes, two) }),
        of("delete", 0, &Request::Delete { area: Area::Checkpoints, name: one.clone() }),
        of("list", 0, &Request::List { area: Area::Tmp }),
        of("usage", 0, &Request::Usage),
        of("group", 0, &Request::CreateGroup { name: one.clone(), limits }),
        of("group_up", 0, &Request::EndGroup { name: "..".to_owned() }),
        of("weigh", 0, &Request::WeighGroup { name: one.clone(), weight: Weight::Background }),
        of("start", 3, &Request::Start(start())),
        of("start_all_descriptors", FDS_MAX, &Request::Start(start())),
        of("start_too_many_descriptors", FDS_MAX + 1, &Request::Start(start())),
        of("start_too_long", TOO_LONG + 1, &Request::Start(start())),
        of("start_itself", 1, &given(".")),
        of("start_up", 1, &given("..")),
        of("start_path", 1, &given("run/../../two/disk.img")),
        of("start_strange", 1, &Request::Start(Start { driver: "\0".repeat(5000), ..start() })),
        of("start_template", 1, &Request::Start(Start { area: Area::Templates, ..start() })),
        of("open", 0, &Request::Open { identity }),
        of("order", 0, &Request::Order { identity, order: Order::Kill }),
        of("build", 2, &Request::Build(build)),
        of("end_build", 0, &Request::EndBuild { name: Some(one) }),
        of("end_builds", 0, &Request::EndBuild { name: None }),
        seed("torn", [&[2][..], br#"{"Create":{"area":"Tmp","na"#].concat()),
    ]
}
