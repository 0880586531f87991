//! Users of the guest, read from its own files: a static program has no name service. The files are the guest's, so their
//! size is bounded and nonsense in them is skipped.

use std::fs::File;
use std::io::Read as _;

const FILE_MAX_BYTES: u64 = 1 << 20;
const GROUPS_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
    pub shell: String,
}

fn read(path: &str) -> String {
    let mut text = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(FILE_MAX_BYTES).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// `name`, `uid`, `name:group` or `uid:gid`. A number needs no entry.
pub fn resolve(spec: &str) -> Result<User, String> {
    resolve_in(spec, &read("/etc/passwd"), &read("/etc/group"))
}

fn resolve_in(spec: &str, passwd: &str, group: &str) -> Result<User, String> {
    let (who, group_spec) = spec.split_once(':').map_or((spec, None), |(who, group)| (who, Some(group)));
    let who = if who.is_empty() { "root" } else { who };
    let number: Option<u32> = who.parse().ok();
    let entries = passwd.lines().filter_map(parse_passwd);
    let known = entries.into_iter().find(|user| number.map_or(user.name == who, |uid| user.uid == uid));
    let mut user = match (known, number, who) {
        (Some(user), _, _) => user,
        (None, Some(uid), _) => bare(who, uid),
        (None, None, "root") => bare("root", 0),
        (None, None, _) => return Err(format!("the sandbox has no user {who:?}")),
    };
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        if let [_, _, gid, members] = fields[..]
            && members.split(',').any(|member| member == user.name)
            && let Ok(gid) = gid.parse()
            && user.groups.len() < GROUPS_MAX
        {
            user.groups.push(gid);
        }
    }
    if let Some(wanted) = group_spec.filter(|g| !g.is_empty()) {
        let by_name = group.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            (fields.len() >= 3 && fields[0] == wanted).then(|| fields[2].parse().ok())?
        });
        user.gid = wanted.parse().ok().or(by_name).ok_or_else(|| format!("the sandbox has no group {wanted:?}"))?;
    }
    if !user.groups.contains(&user.gid) {
        user.groups.push(user.gid);
    }
    Ok(user)
}

fn bare(name: &str, uid: u32) -> User {
    let home = if uid == 0 { "/root" } else { "/" };
    User { name: name.to_owned(), uid, gid: uid, groups: vec![], home: home.to_owned(), shell: "/bin/sh".to_owned() }
}

fn parse_passwd(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
    let or = |text: &str, default: &str| if text.is_empty() { default.to_owned() } else { text.to_owned() };
    Some(User {
        name: name.to_owned(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        groups: vec![],
        home: or(home, "/"),
        shell: or(shell, "/bin/sh"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nnonsense\nuser:x:1000:1000::/home/user:/bin/bash\n";
    const GROUP: &str = "root:x:0:\nuser:x:1000:\nsudo:x:27:user\n";

    #[test]
    fn names_numbers_and_groups() {
        let user = resolve_in("user", PASSWD, GROUP).expect("known");
        assert_eq!((user.uid, user.gid, user.home.as_str()), (1000, 1000, "/home/user"));
        assert_eq!(user.groups, [27, 1000]);
        assert_eq!(resolve_in("1000", PASSWD, GROUP).expect("known").name, "user");
        assert_eq!(resolve_in("1000:sudo", PASSWD, GROUP).expect("known").gid, 27);
        assert_eq!(resolve_in("77:88", PASSWD, GROUP).map(|u| (u.uid, u.gid)), Ok((77, 88)));
        assert_eq!(resolve_in("root", "", "").map(|u| u.uid), Ok(0));
        assert!(resolve_in("nobody-here", PASSWD, GROUP).is_err());
        assert!(resolve_in("user:nogroup", PASSWD, GROUP).is_err());
    }
}
