//! Layouts and archives of images, built into disks that ext4's own tools then look at.

mod common;

use std::path::Path;
use std::time::Instant;

use common::*;
use space_image::{ImageError, NoProgress, Progress, Source, build, source};

fn image() -> TestImage {
    let cap = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let base = archive(&[
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:42:43::/srv:/bin/ash\n"),
        file("etc/group", b"app:x:43:\nextra:x:99:app\n"),
        file("bin/tool", b"tool").mode(0o4755),
        hard("bin/tool2", "bin/tool"),
        file("bin/ping", b"p").mode(0o755).pax("SCHILY.xattr.security.capability", &cap),
        e(CHAR, "dev/null").mode(0o666).dev(1, 3),
        e(FIFO, "run/pipe"),
        link("bin/sh", "tool"),
        file("gone", b"x"),
    ]);
    let second = archive(&[
        file(".wh.gone", b""),
        file("srv/data", b"hello").owner(42, 43).pax("SCHILY.xattr.user.note", b"kept"),
    ]);
    let third = archive(&[file("srv/last", &[9; 10_000])]);
    TestImage::new(
        &[base, second, third],
        serde_json::json!({
            "User": "app", "Env": ["A=1"], "Entrypoint": ["/bin/tool"], "Cmd": ["x"],
            "WorkingDir": "/srv", "ExposedPorts": {"8080/tcp": {}}, "Labels": {"l": "v"},
        }),
        "amd64",
    )
}

fn check(dir: &Path, built: &space_image::Built) {
    let disk = dir.join("disk.img");
    check_disk(&disk);
    assert_eq!((built.user.uid, built.user.gid, &built.user.groups[..]), (42, 43, &[99][..]));
    assert_eq!(built.config.command_line(), ["/bin/tool", "x"]);
    assert_eq!((built.config.workdir.as_str(), built.config.env["A"].as_str()), ("/srv", "1"));
    let stat = |name: &str| debugfs(&disk, &format!("stat {name}"));
    let tool = stat("/bin/tool");
    assert!(tool.contains("Mode:  04755") && tool.contains("Links: 2"), "{tool}");
    let inode = |s: &str| s.split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(inode(&tool), inode(&stat("/bin/tool2")));
    assert!(stat("/bin/ping").contains("security.capability"), "{}", stat("/bin/ping"));
    assert!(stat("/dev/null").contains("character special"), "{}", stat("/dev/null"));
    assert!(stat("/run/pipe").contains("FIFO"));
    assert!(stat("/bin/sh").contains("symlink"));
    assert!(stat("/gone").contains("File not found"));
    let data = stat("/srv/data");
    assert!(data.contains("User:    42   Group:    43"), "{data}");
    assert!(data.contains("user.note") && data.contains("kept"), "{data}");
    assert!(data.contains("2020"), "the time of the image: {data}");
    assert!(debugfs(&disk, "cat /srv/data").starts_with("hello"));
}

#[test]
fn layout_directory() {
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    let (ours, other) = (image(), TestImage::new(&[], serde_json::json!({}), "arm64"));
    write_layout(&layout, &[(&other, Some("arm64"), None), (&ours, Some("amd64"), None)]);
    let source = source::parse(&format!("oci:{}", layout.display())).unwrap();
    let built = build(&request(source, dir.path()), &NoProgress).unwrap();
    assert_eq!(built.image_digest.as_deref(), Some(ours.manifest.as_str()));
    check(dir.path(), &built);
}

#[test]
fn tags_and_platforms_of_a_layout() {
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    let one = TestImage::new(&[archive(&[file("one", b"")])], serde_json::json!({}), "amd64");
    let two = TestImage::new(&[archive(&[file("two", b"")])], serde_json::json!({}), "amd64");
    write_layout(&layout, &[(&one, None, Some("v1")), (&two, None, Some("r.test/x:v2"))]);
    let with = |tag: Option<&str>| Source::OciLayoutDir { path: layout.clone(), tag: tag.map(str::to_owned) };
    for (tag, name) in [("v1", "one"), ("v2", "two"), ("r.test/x:v2", "two")] {
        let out = tempfile::tempdir().unwrap();
        build(&request(with(Some(tag)), out.path()), &NoProgress).unwrap();
        let ls = debugfs(&out.path().join("disk.img"), "ls /");
        assert!(ls.contains(name), "{ls}");
    }
    let fails = |source| {
        let out = tempfile::tempdir().unwrap();
        build(&request(source, out.path()), &NoProgress).unwrap_err()
    };
    assert!(matches!(fails(with(None)), ImageError::NoPlatform { .. }));
    let e = fails(with(Some("v3")));
    assert!(e.to_string().contains("v1") && e.to_string().contains("r.test/x:v2"), "{e}");
    let arm = TestImage::new(&[], serde_json::json!({}), "arm64");
    let only_arm = dir.path().join("arm");
    write_layout(&only_arm, &[(&arm, None, None)]);
    let e = fails(Source::OciLayoutDir { path: only_arm, tag: None });
    assert!(e.to_string().contains("linux/arm64"), "{e}");
    let empty = dir.path().join("outside");
    std::fs::create_dir(&empty).unwrap();
    let e = fails(Source::OciLayoutDir { path: empty, tag: None });
    assert!(matches!(e, ImageError::BadImage { .. }));
}

#[test]
fn archives_of_both_kinds() {
    let image = image();
    // A tar of a layout, compressed.
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    write_layout(&layout, &[(&image, None, Some("v1"))]);
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_dir_all(".", &layout).unwrap();
    let path = dir.path().join("image.tar.gz");
    std::fs::write(&path, gzip(&tar.into_inner().unwrap())).unwrap();
    let source = source::parse(&format!("oci-archive:{}#v1", path.display())).unwrap();
    let built = build(&request(source, dir.path()), &NoProgress).unwrap();
    assert_eq!(built.image_digest.as_deref(), Some(image.manifest.as_str()));
    check(dir.path(), &built);

    // What `docker save` used to write; one layer is a link to another's file.
    let saved = |layers: &[Vec<u8>]| {
        archive(&[
            file(
                "manifest.json",
                br#"[{"Config":"c.json","RepoTags":["x:v1"],"Layers":["a/layer.tar","b/layer.tar","c/layer.tar"]}]"#,
            ),
            file("c.json", &image.config_bytes),
            file("a/layer.tar", &layers[0]),
            link("b/layer.tar", "../real/two"),
            file("real/two", &layers[1]),
            file("c/layer.tar", &layers[2]),
        ])
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved.tar");
    std::fs::write(&path, saved(&image.layers)).unwrap();
    let with = |tag: Option<&str>| Source::OciArchive { path: path.clone(), tag: tag.map(str::to_owned) };
    let built = build(&request(with(Some("v1")), dir.path()), &NoProgress).unwrap();
    check(dir.path(), &built);
    let out = tempfile::tempdir().unwrap();
    let e = build(&request(with(Some("v2")), out.path()), &NoProgress).unwrap_err();
    assert!(e.to_string().contains("x:v1"), "{e}");

    // A layer that was changed after the image was made.
    let mut layers = image.layers.clone();
    layers[2] = archive(&[file("evil", b"")]);
    std::fs::write(&path, saved(&layers)).unwrap();
    let out = tempfile::tempdir().unwrap();
    let e = build(&request(with(None), out.path()), &NoProgress).unwrap_err();
    assert!(matches!(e, ImageError::DigestMismatch { .. }), "{e:?}");
    assert!(!out.path().join("disk.img").exists());
}

#[test]
fn damaged_layouts_are_refused() {
    let image = image();
    let damage = |what: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        let layout = dir.path().join("layout");
        write_layout(&layout, &[(&image, None, None)]);
        what(&layout);
        let source = Source::OciLayoutDir { path: layout, tag: None };
        let e = build(&request(source, dir.path()), &NoProgress).unwrap_err();
        assert!(!dir.path().join("disk.img").exists());
        e
    };
    let blob = |l: &Path, i: usize| l.join("blobs/sha256").join(&image.blobs[i].0[7..]);
    for i in 0..4 {
        // A valid stream with other content, or a changed document.
        let e = damage(&|l| {
            let data = match i {
                0 => gzip(&archive(&[file("evil", b"x")])),
                3 => b"{}".to_vec(),
                _ => archive(&[file("evil", b"x")]),
            };
            std::fs::write(blob(l, i), data).unwrap();
        });
        assert!(matches!(e, ImageError::DigestMismatch { .. }), "{i}: {e:?}");
        let e = damage(&|l| std::fs::remove_file(blob(l, i)).unwrap());
        assert!(matches!(e, ImageError::BadImage { .. }), "{i}: {e:?}");
    }
    // Bytes after the end of the compressed stream.
    let e = damage(&|l| {
        let mut data = image.blobs[2].1.clone();
        data.extend_from_slice(b"tail");
        std::fs::write(blob(l, 2), data).unwrap();
    });
    assert!(matches!(e, ImageError::DigestMismatch { .. }), "{e:?}");
    // A blob that is a link to a file of the host, or a device that never ends.
    let e = damage(&|l| {
        std::fs::remove_file(blob(l, 0)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", blob(l, 0)).unwrap();
    });
    assert!(matches!(e, ImageError::BadImage { .. }), "{e:?}");
    // Digests that would be paths.
    let e = damage(&|l| {
        let index = r#"{"manifests":[{"digest":"sha256:../../../../etc/passwd","size":1}]}"#;
        std::fs::write(l.join("index.json"), index).unwrap();
    });
    assert!(matches!(e, ImageError::BadImage { .. }), "{e:?}");
    let e = damage(&|l| std::fs::write(l.join("index.json"), vec![b' '; 5 << 20]).unwrap());
    assert!(matches!(e, ImageError::LimitExceeded { .. }), "{e:?}");
}

#[test]
fn root_file_systems() {
    let data = archive(&[
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"),
        file("etc/marker", b"here").mode(0o600).owner(7, 8),
        file(".wh.plain", b"kept"),
    ]);
    let dir = tempfile::tempdir().unwrap();
    let mut variants =
        vec![("plain", data.clone()), ("gz", gzip(&data)), ("zst", zstd::encode_all(&data[..], 1).unwrap())];
    std::fs::write(dir.path().join("for-xz"), &data).unwrap();
    let xz = std::process::Command::new("/usr/bin/xz").arg("-c").arg(dir.path().join("for-xz")).output();
    match xz {
        Ok(out) if out.status.success() => variants.push(("xz", out.stdout)),
        _ => println!("SKIP xz: /usr/bin/xz is not there"),
    }
    for (name, bytes) in variants {
        let out = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("rootfs.{name}"));
        std::fs::write(&path, &bytes).unwrap();
        let built = build(&request(Source::RootfsTar(path.clone()), out.path()), &NoProgress)
            .unwrap_or_else(|e| panic!("{name}: {e:?}"));
        assert_eq!((built.user.uid, built.config.workdir.as_str()), (0, "/"));
        let disk = out.path().join("disk.img");
        check_disk(&disk);
        assert!(debugfs(&disk, "stat /etc/marker").contains("User:     7   Group:     8"));
        assert!(debugfs(&disk, "ls /").contains(".wh.plain"));
        if name != "plain" {
            let out = tempfile::tempdir().unwrap();
            std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
            let source = Source::RootfsTar(path);
            build(&request(source, out.path()), &NoProgress).expect_err("a cut stream");
        }
    }

    // A directory, with a socket in it, which a disk cannot hold and nobody misses.
    let tree = dir.path().join("tree");
    std::fs::create_dir_all(tree.join("etc")).unwrap();
    std::fs::write(tree.join("etc/marker"), "dir").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("sock")).unwrap();
    let out = tempfile::tempdir().unwrap();
    build(&request(Source::RootfsDir(tree), out.path()), &NoProgress).unwrap();
    check_disk(&out.path().join("disk.img"));
    assert!(debugfs(&out.path().join("disk.img"), "cat /etc/marker").contains("dir"));
}

struct CancelAt(&'static str, std::sync::atomic::AtomicBool);

impl Progress for CancelAt {
    fn step(&self, text: &str) {
        if text.contains(self.0) {
            self.1.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    fn bytes(&self, _: u64, _: Option<u64>) {}
    fn cancelled(&self) -> bool {
        self.1.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[test]
fn cancel_leaves_the_work_directory_only() {
    for step in ["layer 2", "writing the disk"] {
        let dir = tempfile::tempdir().unwrap();
        let layout = dir.path().join("layout");
        write_layout(&layout, &[(&image(), None, None)]);
        let source = Source::OciLayoutDir { path: layout, tag: None };
        let progress = CancelAt(step, false.into());
        let start = Instant::now();
        let e = build(&request(source, dir.path()), &progress).unwrap_err();
        assert!(matches!(e, ImageError::Cancelled), "{e:?}");
        assert!(start.elapsed().as_secs() < 10);
        let mut left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["layout", "work"], "{step}");
    }
}
