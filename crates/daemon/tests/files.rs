//! Files: whole or not at all, with a user's rights, in constant memory, and nothing outside of its place.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use common::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sha2::{Digest, Sha256};
use space_proto::guest::*;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

fn open(path: &str) -> WriteFileOpen {
    WriteFileOpen { path: path.into(), ..Default::default() }
}

fn messages(open: WriteFileOpen, data: &[u8], end: bool) -> Vec<WriteFileChunk> {
    let mut out = vec![WriteFileChunk { open: Some(open), ..Default::default() }];
    out.extend(data.chunks(64 * 1024).map(|c| WriteFileChunk { data: c.to_vec().into(), ..Default::default() }));
    if end {
        out.push(WriteFileChunk { end: true, ..Default::default() });
    }
    out
}

async fn write(client: &mut Client, open: WriteFileOpen, data: &[u8]) -> Result<FileStat, Status> {
    client.write_file(tokio_stream::iter(messages(open, data, true))).await.map(|r| r.into_inner())
}

async fn read_range(client: &mut Client, path: &str, offset: u64, length: u64) -> Result<(FileStat, Vec<u8>), Status> {
    let request = ReadFileRequest { path: path.into(), offset, length, ..Default::default() };
    let mut stream = client.read_file(request).await?.into_inner();
    let (mut stat, mut data) = (None, Vec::new());
    while let Some(chunk) = stream.message().await? {
        stat = stat.or(chunk.stat);
        data.extend_from_slice(&chunk.data);
    }
    Ok((stat.expect("the first chunk has no stat"), data))
}

async fn read(client: &mut Client, path: &str) -> Result<Vec<u8>, Status> {
    read_range(client, path, 0, 0).await.map(|(_, data)| data)
}

fn path_request(path: &str) -> PathRequest {
    PathRequest { path: path.into(), ..Default::default() }
}

fn leftovers(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).unwrap().flatten();
    names.filter(|e| e.file_name().to_string_lossy().starts_with(".space-upload-")).count()
}

#[tokio::test]
async fn files_go_in_and_come_out_whole_or_in_ranges() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let path = daemon.path("data");
    let data: Vec<u8> = (0..1_000_003u32).map(|n| (n * 31 % 251) as u8).collect();
    let stat = write(&mut client, open(&path), &data).await.unwrap();
    assert_eq!((stat.size, stat.mode, stat.kind()), (1_000_003, 0o644, FileKind::File));
    assert_eq!(read(&mut client, &path).await.unwrap(), data);
    for (offset, length) in [(0, 1), (500_000, 100_000), (999_999, 1000)] {
        let range = read_range(&mut client, &path, offset, length).await.unwrap().1;
        let end = data.len().min((offset + length) as usize);
        assert_eq!(range, data[offset as usize..end]);
    }
    let beyond = read_range(&mut client, &path, 2_000_000, 0).await.unwrap_err();
    assert_eq!(beyond.code(), Code::OutOfRange);
    let empty = daemon.path("empty");
    write(&mut client, open(&empty), b"").await.unwrap();
    assert_eq!(read(&mut client, &empty).await.unwrap(), b"");
}

#[tokio::test]
async fn half_a_gigabyte_passes_in_constant_memory() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let path = daemon.path("large");
    let chunk: bytes::Bytes = (0..64 * 1024u32).map(|n| (n % 253) as u8).collect::<Vec<_>>().into();
    let (sender, receiver) = mpsc::channel(4);
    let (first, sent) = (open(&path), chunk.clone());
    tokio::spawn(async move {
        sender.send(WriteFileChunk { open: Some(first), ..Default::default() }).await.unwrap();
        for _ in 0..4096 {
            sender.send(WriteFileChunk { data: sent.clone(), ..Default::default() }).await.unwrap();
        }
        sender.send(WriteFileChunk { end: true, ..Default::default() }).await.unwrap();
    });
    let stat = client.write_file(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    assert_eq!(stat.size, 4096 * 64 * 1024);
    let mut expected = Sha256::new();
    for _ in 0..4096 {
        expected.update(&chunk);
    }
    let request = ReadFileRequest { path, ..Default::default() };
    let mut stream = client.read_file(request).await.unwrap().into_inner();
    let mut sum = Sha256::new();
    while let Some(chunk) = stream.message().await.unwrap() {
        sum.update(&chunk.data);
    }
    assert_eq!(sum.finalize(), expected.finalize());
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 60 * 1024, "the daemon took {peak} KiB");
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let path = daemon.path("kept");
    write(&mut client, open(&path), b"before").await.unwrap();
    // A clean end of the stream without the end mark, and a torn one.
    let broken = client.write_file(tokio_stream::iter(messages(open(&path), &[1; 200_000], false))).await.unwrap_err();
    assert_eq!(broken.code(), Code::Aborted);
    let (sender, receiver) = mpsc::channel(4);
    for message in messages(open(&path), &[1; 60_000], false) {
        sender.send(message).await.unwrap();
    }
    let upload = client.write_file(ReceiverStream::new(receiver));
    assert!(tokio::time::timeout(Duration::from_millis(200), upload).await.is_err());
    drop(sender);
    eventually("the temporary file goes", || leftovers(daemon.dir.path()) == 0).await;
    assert_eq!(read(&mut client, &path).await.unwrap(), b"before");
}

#[tokio::test]
async fn overwriting_keeps_the_mode_and_follows_links_to_the_file() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let path = daemon.path("tool");
    write(&mut client, WriteFileOpen { mode: 0o750, ..open(&path) }, b"one").await.unwrap();
    assert_eq!(write(&mut client, open(&path), b"two").await.unwrap().mode, 0o750);
    let link = daemon.path("link");
    symlink(&path, &link).unwrap();
    write(&mut client, open(&link), b"three").await.unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(read(&mut client, &path).await.unwrap(), b"three");
    let deep = daemon.path("a/b/c");
    assert_eq!(write(&mut client, open(&deep), b"x").await.unwrap_err().code(), Code::NotFound);
    write(&mut client, WriteFileOpen { parents: true, ..open(&deep) }, b"x").await.unwrap();
    assert_eq!(read(&mut client, &deep).await.unwrap(), b"x");
}

#[tokio::test]
async fn what_is_no_file_is_refused_without_blocking() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let fifo = daemon.path("fifo");
    nix::unistd::mkfifo(fifo.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let folder = daemon.dir.path().to_str().unwrap().to_owned();
    for path in [&fifo, &folder, &"/dev/zero".to_string()] {
        let error = read(&mut client, path).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{path}: {error}");
        let error = write(&mut client, open(path), b"x").await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{path}: {error}");
    }
}

#[tokio::test]
async fn paths_of_every_bad_kind_get_a_clear_answer() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let (long, wide, nul) = (format!("/{}", "x/".repeat(5000)), format!("/{}", "y".repeat(256)), "/a\0b".to_owned());
    for path in ["", &long, &wide, &nul] {
        let error = client.stat_file(path_request(path)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert_eq!(write(&mut client, open(path), b"x").await.unwrap_err().code(), Code::InvalidArgument);
    }
    assert_eq!(client.stat_file(path_request("/nowhere/at/all")).await.unwrap_err().code(), Code::NotFound);
    let below_file = client.stat_file(path_request("/etc/passwd/x")).await.unwrap_err();
    assert_eq!(below_file.code(), Code::FailedPrecondition, "{below_file}");
    // `..` is the kernel's business.
    assert_eq!(
        client.stat_file(path_request("/../etc/../etc/passwd")).await.unwrap().into_inner().kind(),
        FileKind::File
    );
    let (a, b) = (daemon.path("a"), daemon.path("b"));
    symlink(&b, &a).unwrap();
    symlink(&a, &b).unwrap();
    let circle = client.stat_file(PathRequest { follow: true, ..path_request(&a) }).await.unwrap_err();
    assert_eq!(circle.code(), Code::FailedPrecondition, "{circle}");
    assert_eq!(client.stat_file(path_request(&a)).await.unwrap().into_inner().target, b);
}

#[tokio::test]
async fn folders_are_made_listed_in_pages_renamed_and_removed() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let folder = daemon.path("f");
    let make = |path: &str, parents| MakeDirRequest { path: path.into(), parents, mode: 0o711, ..Default::default() };
    assert_eq!(client.make_dir(make(&folder, false)).await.unwrap().into_inner().mode, 0o711);
    assert_eq!(client.make_dir(make(&folder, false)).await.unwrap_err().code(), Code::AlreadyExists);
    client.make_dir(make(&folder, true)).await.unwrap();
    for n in 0..25 {
        write(&mut client, open(&format!("{folder}/n{n:02}")), b"").await.unwrap();
    }
    let (mut names, mut after) = (Vec::new(), String::new());
    loop {
        let request = ListDirRequest { path: folder.clone(), limit: 10, after: after.clone(), ..Default::default() };
        let page = client.list_dir(request).await.unwrap().into_inner();
        assert!(page.entries.len() <= 10);
        names.extend(page.entries.iter().map(|e| e.path.rsplit('/').next().unwrap().to_owned()));
        if !page.more {
            break;
        }
        after = names.last().unwrap().clone();
    }
    assert_eq!(names, (0..25).map(|n| format!("n{n:02}")).collect::<Vec<_>>());
    let remove = |path: &str, recursive| RemoveFileRequest { path: path.into(), recursive, ..Default::default() };
    assert_eq!(client.remove_file(remove(&folder, false)).await.unwrap_err().code(), Code::FailedPrecondition);
    let renamed = daemon.path("g");
    let request = RenameFileRequest { from: folder.clone(), to: renamed.clone(), ..Default::default() };
    assert_eq!(client.rename_file(request.clone()).await.unwrap().into_inner().path, renamed);
    assert_eq!(client.rename_file(request).await.unwrap_err().code(), Code::NotFound);
    client.remove_file(remove(&renamed, true)).await.unwrap();
    assert_eq!(client.remove_file(remove(&renamed, true)).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_user_can_do_what_that_user_can_do_and_root_is_root_after_it() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let secret = daemon.path("secret");
    write(&mut client, WriteFileOpen { mode: 0o600, ..open(&secret) }, b"root's").await.unwrap();
    for _ in 0..20 {
        let request = ReadFileRequest { path: secret.clone(), user: "daemon".into(), ..Default::default() };
        let code = match client.read_file(request).await {
            Err(status) => status.code(),
            Ok(stream) => stream.into_inner().message().await.unwrap_err().code(),
        };
        assert_eq!(code, Code::PermissionDenied);
        assert_eq!(read(&mut client, &secret).await.unwrap(), b"root's");
        let own = daemon.path("own");
        let stat = write(&mut client, WriteFileOpen { user: "daemon".into(), ..open(&own) }, b"mine").await.unwrap();
        assert_eq!((stat.uid, stat.gid), (1, 1));
    }
    let etc = write(&mut client, WriteFileOpen { user: "daemon".into(), ..open("/etc/space-test") }, b"x").await;
    assert_eq!(etc.unwrap_err().code(), Code::PermissionDenied);
    let unknown = write(&mut client, WriteFileOpen { user: "who".into(), ..open(&secret) }, b"x").await.unwrap_err();
    assert!(unknown.message().contains("who"), "{unknown}");
}

/// A file system of its own, gone with the value.
struct Small(String);

impl Small {
    fn new(path: String, bytes: u64) -> Option<Self> {
        std::fs::create_dir(&path).unwrap();
        let size = format!("size={bytes}");
        match mount(Some("tmpfs"), path.as_str(), Some("tmpfs"), MsFlags::empty(), Some(size.as_str())) {
            Ok(()) => Some(Self(path)),
            Err(error) => {
                eprintln!("SKIP: a tmpfs cannot be mounted: {error}");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = umount2(self.0.as_str(), MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_full_disk_is_told_early_and_late_and_leaves_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let Some(small) = Small::new(daemon.path("small"), 1024 * 1024) else { return };
    let path = format!("{}/file", small.0);
    let early = write(&mut client, WriteFileOpen { size_hint: 5_000_000, ..open(&path) }, b"").await.unwrap_err();
    assert_eq!(early.code(), Code::ResourceExhausted);
    assert!(early.message().contains("free"), "{early}");
    let late = write(&mut client, open(&path), &vec![1; 3_000_000]).await.unwrap_err();
    assert_eq!(late.code(), Code::ResourceExhausted, "{late}");
    eventually("the temporary file goes", || leftovers(Path::new(&small.0)) == 0).await;
    write(&mut client, open(&path), &vec![1; 500_000]).await.unwrap();
    let archive = tar_of(|tar| add(tar, tar::EntryType::Regular, "big", "", &vec![1; 3_000_000]));
    let full = unpack(&mut client, &format!("{}/in", small.0), &archive).await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted, "{full}");
}

fn tar_of(build: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    build(&mut builder);
    builder.into_inner().unwrap()
}

/// Also names that the library would refuse to write.
fn add(builder: &mut tar::Builder<Vec<u8>>, kind: tar::EntryType, name: &str, link: &str, data: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_size(data.len() as u64);
    header.set_mode(if kind == tar::EntryType::Directory { 0o755 } else { 0o640 });
    header.set_mtime(1_000_000_000);
    header.set_cksum();
    builder.append(&header, data).unwrap();
}

async fn unpack(client: &mut Client, path: &str, archive: &[u8]) -> Result<WriteArchiveReply, Status> {
    client.write_archive(tokio_stream::iter(messages(open(path), archive, true))).await.map(|r| r.into_inner())
}

async fn unpack_as(client: &mut Client, path: &str, user: &str, archive: &[u8]) -> Result<WriteArchiveReply, Status> {
    let open = WriteFileOpen { user: user.into(), ..open(path) };
    client.write_archive(tokio_stream::iter(messages(open, archive, true))).await.map(|r| r.into_inner())
}

async fn pack(client: &mut Client, path: &str) -> Result<Vec<u8>, Status> {
    let mut stream = client.read_archive(path_request(path)).await?.into_inner();
    let mut data = Vec::new();
    while let Some(chunk) = stream.message().await? {
        data.extend_from_slice(&chunk.data);
    }
    Ok(data)
}

#[tokio::test]
async fn a_folder_goes_out_and_in_again_as_it_was() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let from = daemon.path("from");
    std::fs::create_dir_all(format!("{from}/sub/empty")).unwrap();
    std::fs::write(format!("{from}/sub/file"), vec![9; 200_000]).unwrap();
    std::fs::write(format!("{from}/run"), "#!").unwrap();
    std::fs::set_permissions(format!("{from}/run"), std::fs::Permissions::from_mode(0o755)).unwrap();
    symlink("sub/file", format!("{from}/link")).unwrap();
    symlink("/etc/passwd", format!("{from}/absolute")).unwrap();
    std::fs::write(format!("{from}/{}", "n".repeat(200)), "long name").unwrap();
    std::os::unix::net::UnixListener::bind(format!("{from}/socket")).unwrap();
    nix::unistd::mkfifo(format!("{from}/fifo").as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let old = std::time::UNIX_EPOCH + Duration::from_secs(1_234_567_890);
    std::fs::File::open(format!("{from}/run")).unwrap().set_modified(old).unwrap();
    let archive = pack(&mut client, &from).await.unwrap();
    let to = daemon.path("to/deep");
    unpack(&mut client, &to, &archive).await.unwrap();
    assert_eq!(std::fs::read(format!("{to}/sub/file")).unwrap(), vec![9; 200_000]);
    assert!(Path::new(&format!("{to}/sub/empty")).is_dir());
    let run = std::fs::metadata(format!("{to}/run")).unwrap();
    assert_eq!((run.mode() & 0o777, run.mtime()), (0o755, 1_234_567_890));
    assert_eq!(std::fs::read_link(format!("{to}/link")).unwrap(), Path::new("sub/file"));
    assert_eq!(std::fs::read_link(format!("{to}/absolute")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(std::fs::read_to_string(format!("{to}/{}", "n".repeat(200))).unwrap(), "long name");
    assert!(!exists(format!("{to}/socket")) && !exists(format!("{to}/fifo")));
    let single = pack(&mut client, &format!("{from}/run")).await.unwrap();
    let mut archive = tar::Archive::new(&single[..]);
    let names: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned()).collect();
    assert_eq!(names, [Path::new("run")]);
}

#[tokio::test]
async fn nothing_in_an_archive_gets_out_of_its_folder() {
    use tar::EntryType as Kind;
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let outside = daemon.path("outside");
    std::fs::create_dir(&outside).unwrap();
    type Build<'a> = Box<dyn Fn(&mut tar::Builder<Vec<u8>>) + 'a>;
    let evil: Vec<(&str, Build)> = vec![
        ("climbs", Box::new(|t| add(t, Kind::Regular, "../outside/evil", "", b"x"))),
        ("climbs later", Box::new(|t| add(t, Kind::Regular, "a/../../outside/evil", "", b"x"))),
        (
            "through a link",
            Box::new(|t| {
                add(t, Kind::Symlink, "door", &outside, b"");
                add(t, Kind::Regular, "door/evil", "", b"x");
            }),
        ),
        (
            "through a relative link",
            Box::new(|t| {
                add(t, Kind::Symlink, "door", "../outside", b"");
                add(t, Kind::Regular, "door/evil", "", b"x");
            }),
        ),
        (
            "a folder through a link",
            Box::new(|t| {
                add(t, Kind::Symlink, "door", "../outside", b"");
                add(t, Kind::Directory, "door/evil/", "", b"");
            }),
        ),
        ("hard link", Box::new(|t| add(t, Kind::Link, "evil", "../../../../../../etc/passwd", b""))),
        ("device", Box::new(|t| add(t, Kind::Char, "null", "", b""))),
        ("fifo", Box::new(|t| add(t, Kind::Fifo, "fifo", "", b""))),
    ];
    for (n, (name, build)) in evil.iter().enumerate() {
        let target = daemon.path(&format!("target{n}"));
        let error = unpack(&mut client, &target, &tar_of(build)).await.expect_err(name);
        assert!(matches!(error.code(), Code::InvalidArgument | Code::FailedPrecondition), "{name}: {error}");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "{name}");
    }
    // An absolute name may be refused or taken as relative, but never followed.
    let absolute = tar_of(|t| add(t, Kind::Regular, &format!("{outside}/evil")[..99.min(outside.len() + 5)], "", b"x"));
    let _ = unpack(&mut client, &daemon.path("absolute"), &absolute).await;
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
}

#[tokio::test]
async fn broken_archives_are_told_from_broken_streams() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let good = tar_of(|t| add(t, tar::EntryType::Regular, "a", "", &[1; 100_000]));
    let garbage = unpack(&mut client, &daemon.path("1"), &[7; 5000]).await.unwrap_err();
    assert_eq!(garbage.code(), Code::InvalidArgument, "{garbage}");
    let cut = unpack(&mut client, &daemon.path("2"), &good[..50_000]).await.unwrap_err();
    assert_eq!(cut.code(), Code::InvalidArgument, "{cut}");
    let broken = tokio_stream::iter(messages(open(&daemon.path("3")), &good[..50_000], false));
    let broken = client.write_archive(broken).await.unwrap_err();
    assert!(matches!(broken.code(), Code::Aborted | Code::InvalidArgument), "{broken}");
    unpack(&mut client, &daemon.path("4"), &good).await.unwrap();
}

#[tokio::test]
async fn folders_without_write_permission_get_their_children_first() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let archive = tar_of(|t| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o555);
        header.set_size(0);
        header.set_path("locked/").unwrap();
        header.set_cksum();
        t.append(&header, &b""[..]).unwrap();
        add(t, tar::EntryType::Regular, "locked/child", "", b"x");
    });
    let target = daemon.path("target");
    unpack_as(&mut client, &target, "daemon", &archive).await.unwrap();
    assert_eq!(std::fs::read(format!("{target}/locked/child")).unwrap(), b"x");
    assert_eq!(std::fs::metadata(format!("{target}/locked")).unwrap().mode() & 0o777, 0o555);
}

#[tokio::test]
async fn readers_that_do_not_read_leave_room_for_others() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let path = daemon.path("large");
    write(&mut client, open(&path), &vec![1; 20_000_000]).await.unwrap();
    let mut stalled = Vec::new();
    for _ in 0..12 {
        let request = ReadFileRequest { path: path.clone(), ..Default::default() };
        stalled.push(client.read_file(request).await.unwrap().into_inner());
    }
    let mut other = daemon.client().await;
    let looking = other.stat_file(path_request(&path));
    tokio::time::timeout(Duration::from_secs(10), looking).await.expect("all threads are taken").unwrap();
    drop(stalled);
}
