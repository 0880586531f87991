//! Layers, benign and hostile, applied to a root directory.

mod common;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use common::*;
use space_image::extract::Extractor;
use space_image::rootfs::RootDir;
use space_image::{ImageError, Limits, NoProgress};

struct Root {
    dir: tempfile::TempDir,
}

impl Root {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        // What a hostile layer would like to reach.
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        std::fs::write(dir.path().join("outside/secret"), "untouched").unwrap();
        Self { dir }
    }

    fn apply_limited(&self, layers: &[&[E]], limits: Limits) -> space_image::Result<()> {
        let root = RootDir::open(&self.dir.path().join("root"))?;
        let mut to = Extractor::new(root, limits, &NoProgress);
        for layer in layers {
            to.apply(&archive(layer)[..], true)?;
        }
        Ok(())
    }

    fn apply(&self, layers: &[&[E]]) -> space_image::Result<()> {
        let result = self.apply_limited(layers, Limits::for_disk(64 << 20));
        let outside: Vec<_> =
            std::fs::read_dir(self.dir.path().join("outside")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(outside, ["secret"], "nothing appears outside");
        assert_eq!(std::fs::read_dir(self.dir.path()).unwrap().count(), 2);
        let secret = self.dir.path().join("outside/secret");
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "untouched");
        assert_eq!(std::fs::metadata(&secret).unwrap().nlink(), 1);
        result
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join("root").join(name)
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.at(name)).unwrap_or_else(|e| format!("{e}"))
    }

    fn has(&self, name: &str) -> bool {
        self.at(name).symlink_metadata().is_ok()
    }
}

fn meta(path: &Path) -> std::fs::Metadata {
    path.symlink_metadata().unwrap()
}

fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut buf = vec![0u8; 4096];
    let n = rustix::fs::lgetxattr(path, name, &mut buf[..]).ok()?;
    buf.truncate(n);
    Some(buf)
}

#[test]
fn every_kind_of_file_arrives() {
    let r = Root::new();
    let long = format!("deep/{}/{}", "d".repeat(120), "f".repeat(200));
    let cap = [1, 0, 0, 2, 0, b'\n', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    r.apply(&[&[
        dir("./").mode(0o751),
        dir("bin").mode(0o755).owner(3, 4),
        file("bin/su", b"#!").mode(0o4755).owner(0, 0),
        file("bin/cap", b"x").mode(0o755).pax("SCHILY.xattr.security.capability", &cap),
        file("bin/noted", b"x").pax("SCHILY.xattr.user.note", b"a\nb\0c"),
        file("bin/labelled", b"x").pax("SCHILY.xattr.security.selinux", b"label"),
        link("bin/sh", "/bin/su").owner(5, 6),
        hard("bin/su2", "bin/su"),
        hard("bin/sh2", "bin/sh"),
        e(CHAR, "dev/null").mode(0o666).dev(1, 3),
        e(BLOCK, "dev/sda").mode(0o660).owner(0, 6).dev(8, 300),
        e(FIFO, "run/fifo").mode(0o600),
        file(&long, b"long"),
        file("big-id", b"").pax("uid", b"2000000").pax("gid", b"3000000"),
        file("dated", b"").pax("mtime", b"1500000000.25"),
        file("x", b"by pax").pax("path", "naïve/ü".as_bytes()),
        dir("sticky").mode(0o1777),
        file("sticky/in", b""),
    ]])
    .unwrap();
    assert_eq!(meta(&r.at("")).mode() & 0o7777, 0o751);
    let su = meta(&r.at("bin/su"));
    assert_eq!((su.mode() & 0o7777, su.mtime()), (0o4755, 1_600_000_000));
    assert_eq!((su.nlink(), su.ino()), (2, meta(&r.at("bin/su2")).ino()));
    assert!(meta(&r.at("bin/sh2")).is_symlink(), "a link to a link stays one");
    assert_eq!((meta(&r.at("bin")).uid(), meta(&r.at("bin")).gid()), (3, 4));
    assert_eq!(meta(&r.at("bin/sh")).uid(), 5);
    assert_eq!(xattr(&r.at("bin/cap"), "security.capability").unwrap(), cap);
    assert_eq!(xattr(&r.at("bin/noted"), "user.note").unwrap(), b"a\nb\0c");
    assert_eq!(xattr(&r.at("bin/labelled"), "security.selinux"), None);
    let null = meta(&r.at("dev/null"));
    assert!(null.file_type().is_char_device());
    assert_eq!((null.rdev(), null.mode() & 0o777), (rustix::fs::makedev(1, 3), 0o666));
    assert_eq!(meta(&r.at("dev/sda")).rdev(), rustix::fs::makedev(8, 300));
    assert!(meta(&r.at("run/fifo")).file_type().is_fifo());
    assert_eq!(r.text(&long), "long");
    assert_eq!(meta(&r.at("big-id")).uid(), 2_000_000);
    let dated = meta(&r.at("dated"));
    assert_eq!((dated.mtime(), dated.mtime_nsec()), (1_500_000_000, 250_000_000));
    assert_eq!(r.text("naïve/ü"), "by pax");
    let sticky = meta(&r.at("sticky"));
    assert_eq!((sticky.mode() & 0o7777, sticky.mtime()), (0o1777, 1_600_000_000));
}

#[test]
fn whiteouts_remove_lower_layers_only() {
    let r = Root::new();
    let base = [
        dir("a"),
        file("a/one", b"1"),
        file("a/two", b"2"),
        file("a/sub/deep/x", b"x"),
        file("b/keep", b"k"),
        file("c/old", b"o"),
        link("lnk", "b"),
    ];
    r.apply(&[
        &base,
        &[
            file("a/.wh.one", b""),
            file(".wh.c", b""),
            file("b/.wh.not-there", b""),
            file("none/.wh.x", b""),
            file("a/.wh..wh.plnk", b""),
            file(".wh.lnk", b""),
        ],
    ])
    .unwrap();
    assert!(!r.has("a/one") && !r.has("c") && !r.has("lnk") && !r.has("none"));
    assert!(r.has("a/two") && r.has("b/keep") && !r.has("a/.wh.one"));
    assert!(!r.has("a/.wh..wh.plnk"));

    // Opaque, listed before, between and after what the layer itself brings.
    for at in 0..=2 {
        let r = Root::new();
        let mut layer = vec![dir("a"), file("a/new", b"n"), file("a/sub/mine", b"m")];
        layer.insert(at + 1, file("a/.wh..wh..opq", b""));
        r.apply(&[&base, &layer]).unwrap();
        assert_eq!((r.text("a/new"), r.text("a/sub/mine")), ("n".into(), "m".into()), "at {at}");
        assert!(!r.has("a/one") && !r.has("a/two") && !r.has("a/sub/deep"), "at {at}");
        assert!(r.has("b/keep"));
    }

    // A whiteout and a new file of the same name, in both orders.
    for swap in [false, true] {
        let r = Root::new();
        let mut layer = vec![file(".wh.a", b""), file("a/fresh", b"f")];
        if swap {
            layer.reverse();
        }
        r.apply(&[&base, &layer]).unwrap();
        assert_eq!(r.text("a/fresh"), "f");
        assert!(!r.has("a/one") && !r.has("a/sub"));
    }
    // A tar that is no layer keeps such names.
    let r = Root::new();
    let root = RootDir::open(&r.at("")).unwrap();
    let mut to = Extractor::new(root, Limits::for_disk(1 << 20), &NoProgress);
    to.apply(&archive(&[file(".wh.x", b"plain")])[..], false).unwrap();
    assert_eq!(r.text(".wh.x"), "plain");
}

#[test]
fn kinds_replace_each_other() {
    let r = Root::new();
    r.apply(&[
        &[
            file("d/in", b"1"),
            file("f", b"file"),
            link("l", "/outside"),
            dir("kept").mode(0o700),
            file("kept/x", b"x"),
            file("h1", b"first"),
            hard("h2", "h1"),
            file("way", b"in the way"),
        ],
        &[
            file("d", b"now a file"),
            dir("f"),
            file("f/in", b"2"),
            dir("l"),
            file("l/in", b"3"),
            dir("kept").mode(0o755),
            file("h1", b"second"),
            file("way/below", b"b"),
        ],
    ])
    .unwrap();
    assert_eq!(r.text("d"), "now a file");
    assert_eq!((r.text("f/in"), r.text("l/in")), ("2".into(), "3".into()));
    assert_eq!((r.text("kept/x"), meta(&r.at("kept")).mode() & 0o777), ("x".into(), 0o755));
    assert_eq!((r.text("h1"), r.text("h2")), ("second".into(), "first".into()));
    assert_eq!(r.text("way/below"), "b");
}

#[test]
fn links_in_parents_stay_inside() {
    let r = Root::new();
    let outside = r.dir.path().join("outside");
    r.apply(&[
        &[
            dir("usr/lib"),
            link("lib", "usr/lib"),
            link("abs", "/usr/lib"),
            link("up", "../../../../usr/lib"),
            link("esc", outside.to_str().unwrap()),
            link("rel", "../outside"),
            link("var/run", "/run"),
            link("chain", "esc"),
        ],
        &[
            file("lib/a", b"1"),
            file("abs/b", b"2"),
            file("up/c", b"3"),
            file("esc/secret", b"stolen"),
            file("rel/secret", b"stolen"),
            file("chain/more", b"m"),
            file("var/run/d", b"4"),
            file("esc/.wh.secret", b""),
            file("rel/.wh..wh..opq", b""),
            // A link as the last component is replaced, not written through.
            file("esc", b"plain"),
        ],
    ])
    .unwrap();
    for name in ["a", "b", "c"] {
        assert!(r.has(&format!("usr/lib/{name}")));
    }
    assert_eq!(r.text("run/d"), "4", "a dangling link's target is made");
    assert!(!meta(&r.at("esc")).is_symlink());
    assert!(r.has("outside/secret"), "inside the root, under the same name");
}

#[test]
fn hostile_entries_are_refused() {
    let nul = E { name: b"a\0b".to_vec(), ..file("x", b"") };
    let cases: Vec<(&str, Vec<E>)> = vec![
        ("dotdot", vec![file("../outside/secret", b"x")]),
        ("dotdot inside", vec![file("a/../../outside/secret", b"x")]),
        ("hard link up", vec![hard("x", "../outside/secret")]),
        ("hard link through a link", vec![link("o", "../outside"), hard("x", "o/secret")]),
        ("hard link to nothing", vec![hard("x", "none")]),
        ("hard link to a directory", vec![dir("d"), hard("x", "d")]),
        ("hard link to the root", vec![hard("x", "/")]),
        ("loop", vec![link("l", "l"), file("l/x", b"")]),
        ("two-link loop", vec![link("a", "b"), link("b", "a"), file("a/x", b"")]),
        ("empty link", vec![link("l", "")]),
        ("whiteout of dotdot", vec![file("a/.wh...", b"")]),
        ("whiteout of dot", vec![file("a/.wh..", b"")]),
        ("whiteout of nothing", vec![file("a/.wh.", b"")]),
        ("long component", vec![file(&"x".repeat(256), b"")]),
        ("long path", vec![file(&"abc/".repeat(1100), b"")]),
        ("deep path", vec![file(&"d/".repeat(300), b"")]),
        ("pax dotdot", vec![file("x", b"").pax("path", b"../outside/secret")]),
        ("pax nul", vec![file("x", b"").pax("path", b"a\0b")]),
        ("pax link up", vec![hard("x", "y").pax("linkpath", b"../outside/secret")]),
        (
            "grows by links",
            vec![
                link("g", &"g2/".repeat(100)),
                link("g2", "."),
                file("ok", b""),
                link(&"z".repeat(90), "/"),
                hard("q", "g/../../outside/secret"),
            ],
        ),
    ];
    for (what, entries) in cases {
        let r = Root::new();
        let error = r.apply(&[&entries]).expect_err(what);
        assert!(matches!(error, ImageError::UnsafePath { .. }), "{what}: {error:?}");
    }
    // What stands after a NUL is not part of a header's name.
    let r = Root::new();
    r.apply(&[&[nul]]).unwrap();
    assert!(r.has("a"));
    // Absolute names mean the root of the image, as for every other tool.
    let r = Root::new();
    r.apply(&[&[file("/etc/x", b"1"), file("//y", b"2"), hard("/z", "/etc/x")]]).unwrap();
    assert_eq!((r.text("etc/x"), r.text("y"), r.text("z")), ("1".into(), "2".into(), "1".into()));
}

#[test]
fn everything_is_bounded() {
    let limits = Limits { entries: 10, data_bytes: 100_000, stream_bytes: 300_000, name_bytes: 5_000 };
    let over = |layers: &[&[E]]| {
        let r = Root::new();
        let error = r.apply_limited(layers, limits).unwrap_err();
        let text = format!("{error:?}");
        assert!(matches!(error, ImageError::LimitExceeded { .. }) || text.contains("more than it may"), "{text}");
    };
    let six: Vec<E> = (0..6).map(|i| dir(&format!("d{i}"))).collect();
    over(&[&six, &six]);
    over(&[&[file("a", &[1; 60_000])], &[file("a", &[1; 60_000])]]);
    over(&[&[file("zeros", &[0; 400_000])]]);
    let named: Vec<E> = (0..9).map(|i| dir(&format!("{i}/{}", "n".repeat(200)).repeat(4))).collect();
    over(&[&named]);
    over(&[&[file("x", b"").pax("comment", &vec![b'x'; 2 << 20])]]);
    over(&[&[E { claim: Some(1 << 30), ..e(b'L', "long") }]]);
    let many = (0..70).fold(file("x", b""), |f, i| f.pax(&format!("SCHILY.xattr.user.{i}"), b"v"));
    over(&[&[many]]);
}

#[test]
fn damaged_archives_are_errors() {
    let good = archive(&[file("a", &[7; 3000]), link("l", "a"), file("b", b"x").pax("uid", b"7")]);
    let try_one = |data: &[u8]| {
        let r = Root::new();
        let root = RootDir::open(&r.at("")).unwrap();
        Extractor::new(root, Limits::for_disk(1 << 20), &NoProgress).apply(data, true)
    };
    try_one(&good).unwrap();
    // Cut anywhere inside an entry: an error. Any byte of a header changed: an error or a change
    // of the content, never a panic.
    for cut in [1, 100, 511, 513, 2000, 3000] {
        assert!(try_one(&good[..cut]).is_err(), "cut at {cut}");
    }
    for i in (0..good.len().min(6000)).step_by(7) {
        let mut bad = good.clone();
        bad[i] ^= 0x5a;
        let _ = try_one(&bad);
    }
    let unknown = archive(&[e(b'Z', "strange")]);
    assert!(matches!(try_one(&unknown), Err(ImageError::BadArchive { .. })));
    let mut not_tar = vec![b'x'; 2048];
    not_tar[156] = b'0';
    assert!(matches!(try_one(&not_tar), Err(ImageError::BadArchive { .. })));
}

/// GNU tar is the other side of the formats: it writes, this crate reads.
#[test]
fn sparse_files_of_gnu_tar() {
    let source = tempfile::tempdir().unwrap();
    let path = source.path().join("sparse");
    let f = std::fs::File::create(&path).unwrap();
    use std::os::unix::fs::FileExt;
    f.set_len(40 << 20).unwrap();
    // More ranges than the four that fit into an old GNU header.
    for i in 0..60u64 {
        f.write_all_at(&[i as u8 + 1; 5000], i * (600 << 10) + 12_345).unwrap();
    }
    let expected = std::fs::read(&path).unwrap();
    for args in [
        &["--format=gnu"][..],
        &["--format=pax", "--sparse-version=0.0"],
        &["--format=pax", "--sparse-version=0.1"],
        &["--format=pax", "--sparse-version=1.0"],
    ] {
        let out = std::process::Command::new("/bin/tar")
            .args(args)
            .args(["-S", "-cf", "-", "-C"])
            .arg(source.path())
            .arg("sparse")
            .output()
            .unwrap();
        assert!(out.status.success());
        assert!(out.stdout.len() < 2 << 20, "{args:?} made a sparse archive");
        let r = Root::new();
        let root = RootDir::open(&r.at("")).unwrap();
        Extractor::new(root, Limits::for_disk(64 << 20), &NoProgress)
            .apply(&out.stdout[..], true)
            .unwrap_or_else(|e| panic!("{args:?}: {e:?}"));
        assert!(std::fs::read(r.at("sparse")).unwrap() == expected, "{args:?}");
        assert!(meta(&r.at("sparse")).blocks() * 512 < 4 << 20, "{args:?}: holes stay holes");
    }
}
