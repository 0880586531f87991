//! Counts what a test run may leave on a host: `leaks save FILE` before it, `leaks check FILE` after it.
//!
//! Looks at the kernel's own lists, not at what the project believes to own. Changes nothing.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};

fn names(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().into_string().ok()).collect()
}

fn read(path: String) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn vmms(found: &mut BTreeSet<String>) {
    for pid in names("/proc").iter().filter(|n| n.bytes().all(|b| b.is_ascii_digit())) {
        let comm = read(format!("/proc/{pid}/comm"));
        if comm.starts_with("qemu-system") || comm.starts_with("firecracker") || comm.starts_with("space-daemon") {
            found.insert(format!("process {pid} {comm}"));
        }
    }
}

fn network(found: &mut BTreeSet<String>) {
    for name in names("/sys/class/net") {
        if fs::exists(format!("/sys/class/net/{name}/tun_flags")).unwrap_or(false) {
            found.insert(format!("tap {name}"));
        }
    }
    found.extend(names("/run/netns").into_iter().map(|name| format!("netns {name}")));
}

fn storage(found: &mut BTreeSet<String>) -> Result<()> {
    for line in read("/proc/self/mounts".into()).lines() {
        let mut words = line.split(' ');
        let (Some(_), Some(at), Some(kind)) = (words.next(), words.next(), words.next()) else { continue };
        found.insert(format!("mount {at}"));
        if kind == "btrfs" {
            let list = Command::new("/usr/bin/btrfs").args(["subvolume", "list", at]).output()?;
            let text = String::from_utf8_lossy(&list.stdout);
            // "ID 257 gen 10 top level 5 path templates/abc"
            let paths = text.lines().filter_map(|l| l.split_once(" path ").map(|(_, path)| path));
            found.extend(paths.map(|path| format!("subvolume {at} {path}")));
        }
    }
    for name in names("/sys/block").iter().filter(|n| n.starts_with("loop")) {
        let file = read(format!("/sys/block/{name}/loop/backing_file"));
        if !file.is_empty() {
            found.insert(format!("loop {file}"));
        }
    }
    Ok(())
}

/// Folders of ours in any cgroup hierarchy, v1 or v2, down to one sandbox.
fn cgroups(found: &mut BTreeSet<String>) {
    let mut roots: Vec<String> = names("/sys/fs/cgroup").iter().map(|n| format!("/sys/fs/cgroup/{n}/space")).collect();
    roots.push("/sys/fs/cgroup/space".into());
    for root in roots {
        for server in names(&root) {
            for sandbox in names(&format!("{root}/{server}")) {
                let path = format!("{root}/{server}/{sandbox}");
                if fs::metadata(&path).is_ok_and(|m| m.is_dir()) {
                    found.insert(format!("cgroup {path}"));
                }
            }
        }
    }
}

fn count() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    vmms(&mut found);
    network(&mut found);
    storage(&mut found)?;
    cgroups(&mut found);
    Ok(found)
}

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["save", file] => {
            let found = count()?;
            fs::write(file, found.into_iter().collect::<Vec<_>>().join("\n"))?;
            Ok(ExitCode::SUCCESS)
        }
        ["check", file] => {
            let before: BTreeSet<String> =
                fs::read_to_string(file).context("`leaks save` first")?.lines().map(str::to_owned).collect();
            // btrfs frees deleted subvolumes and the kernel ends processes a moment later.
            let mut left = Vec::new();
            for _ in 0..50 {
                left = count()?.difference(&before).cloned().collect();
                if left.is_empty() {
                    println!("leaks: nothing is left that was not there before ({} things counted)", before.len());
                    return Ok(ExitCode::SUCCESS);
                }
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            println!("leaks: {} left behind:\n{}", left.len(), left.join("\n"));
            Ok(ExitCode::FAILURE)
        }
        _ => bail!("usage: leaks save FILE | leaks check FILE"),
    }
}
