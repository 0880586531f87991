//! Finds the user an image names in the image's own `/etc/passwd` and `/etc/group`. The names of
//! the host must never matter.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{ImageError, Result};
use crate::rootfs::RootDir;

/// Larger user databases are refused.
const MAX_DATABASE_BYTES: u64 = 4 << 20;
const MAX_GROUPS: usize = 1024;

/// A user as the kernel of the guest needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolvedUser {
    /// Name, or the number as text when the image has no name for it.
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// Further groups, without `gid`.
    pub groups: Vec<u32>,
    /// `/` when unknown.
    pub home: String,
    /// `/bin/sh` when unknown.
    pub shell: String,
}

struct Passwd {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
    shell: String,
}

struct Group {
    name: String,
    gid: u32,
    members: Vec<String>,
}

/// Resolves `name`, `uid`, `name:group`, `uid:gid` (and the mixes) inside `root`. An unknown
/// number is good, as in other runtimes; an unknown name is an error.
pub fn resolve_user(root: &Path, spec: &str) -> Result<ResolvedUser> {
    resolve_in(&RootDir::open(root)?, spec)
}

/// [`resolve_user`] in an open root.
pub fn resolve_in(root: &RootDir, spec: &str) -> Result<ResolvedUser> {
    let (user, group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|g| !g.is_empty())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "root" } else { user };
    let passwd = lines(root, "etc/passwd", parse_passwd)?;
    let groups = lines(root, "etc/group", parse_group)?;
    let unknown = || ImageError::UnknownUser { user: crate::error::show(spec.as_bytes()) };

    // A name wins over a number: a user may be called `1000`.
    let found = passwd.iter().find(|p| p.name == user).or_else(|| passwd.iter().find(|p| Some(p.uid) == number(user)));
    let mut resolved = match found {
        Some(p) => ResolvedUser {
            name: p.name.clone(),
            uid: p.uid,
            gid: p.gid,
            groups: Vec::new(),
            home: or(&p.home, "/"),
            shell: or(&p.shell, "/bin/sh"),
        },
        None => ResolvedUser {
            name: user.to_owned(),
            // `root` needs no database: an image of one static program has none.
            uid: match user {
                "root" => 0,
                _ => number(user).ok_or_else(unknown)?,
            },
            gid: 0,
            groups: Vec::new(),
            home: "/".to_owned(),
            shell: "/bin/sh".to_owned(),
        },
    };
    if let Some(group) = group {
        resolved.gid =
            groups.iter().find(|g| g.name == group).map(|g| g.gid).or_else(|| number(group)).ok_or_else(unknown)?;
    } else {
        // With an explicit group, only that one: what the image's author asked for.
        resolved.groups = groups
            .iter()
            .filter(|g| g.gid != resolved.gid && g.members.contains(&resolved.name))
            .map(|g| g.gid)
            .take(MAX_GROUPS)
            .collect();
        resolved.groups.sort_unstable();
        resolved.groups.dedup();
    }
    Ok(resolved)
}

fn or(value: &str, default: &str) -> String {
    if value.is_empty() { default } else { value }.to_owned()
}

/// `u32::MAX` means "leave as it is" to the kernel and is nobody.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten().filter(|id| *id != u32::MAX)
}

fn lines<T>(root: &RootDir, file: &str, parse: fn(&str) -> Option<T>) -> Result<Vec<T>> {
    let data = root.read_file(file, MAX_DATABASE_BYTES)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&data);
    Ok(text.lines().filter_map(parse).collect())
}

fn parse_passwd(line: &str) -> Option<Passwd> {
    let f: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, shell] = f[..] else {
        return None;
    };
    Some(Passwd {
        name: name.to_owned(),
        uid: number(uid)?,
        gid: number(gid)?,
        home: home.to_owned(),
        shell: shell.to_owned(),
    })
}

fn parse_group(line: &str) -> Option<Group> {
    let f: Vec<&str> = line.split(':').collect();
    let [name, _, gid, members] = f[..] else {
        return None;
    };
    Some(Group { name: name.to_owned(), gid: number(gid)?, members: members.split(',').map(str::to_owned).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::fs::write(
            dir.path().join("etc/passwd"),
            "root:x:0:0:root:/root:/bin/bash\nbroken\napp:x:42:43::/srv:\n1000:x:7:7::/seven:/bin/sh\n",
        )
        .unwrap();
        std::fs::write(dir.path().join("etc/group"), "root:x:0:\nstaff:x:50:app\nextra:x:51:root,app\napp:x:43:app\n")
            .unwrap();
        dir
    }

    #[test]
    fn names_numbers_and_groups() {
        let dir = root();
        let of = |s: &str| resolve_user(dir.path(), s);
        let app = of("app").unwrap();
        assert_eq!((app.uid, app.gid, &app.groups[..]), (42, 43, &[50, 51][..]));
        assert_eq!((app.home.as_str(), app.shell.as_str()), ("/srv", "/bin/sh"));
        assert_eq!(of("42").unwrap(), app);
        assert_eq!(of("app:staff").unwrap().gid, 50);
        assert!(of("app:staff").unwrap().groups.is_empty());
        assert_eq!(of("app:77").unwrap().gid, 77);
        assert_eq!(of("1000").unwrap().uid, 7, "a name wins over a number");
        let free = of("5000:6000").unwrap();
        assert_eq!((free.uid, free.gid, free.home.as_str()), (5000, 6000, "/"));
        assert_eq!(of("").unwrap().uid, 0);
        for bad in ["nobody-here", "app:none", "-1", "4294967295", "4294967296", "+5"] {
            assert!(matches!(of(bad), Err(ImageError::UnknownUser { .. })), "{bad}");
        }
    }

    #[test]
    fn hostile_databases() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(resolve_user(dir.path(), "root").unwrap().uid, 0);
        assert!(resolve_user(dir.path(), "app").is_err());
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        // A link to the host's file is looked up inside the root, where it does not exist.
        std::os::unix::fs::symlink("/etc/shadow-of-host", dir.path().join("etc/passwd")).unwrap();
        assert!(resolve_user(dir.path(), "daemon").is_err());
        std::fs::remove_file(dir.path().join("etc/passwd")).unwrap();
        std::os::unix::fs::symlink("../../../../../../etc/passwd", dir.path().join("etc/passwd")).unwrap();
        assert!(resolve_user(dir.path(), "daemon").is_err());
        std::fs::remove_file(dir.path().join("etc/passwd")).unwrap();
        let fifo = dir.path().join("etc/passwd");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o644),
            0,
        )
        .unwrap();
        assert!(resolve_user(dir.path(), "daemon").is_err(), "must not block");
    }
}
