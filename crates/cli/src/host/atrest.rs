//! Whether the pool lies on an encrypted device. It looks at what the kernel says of block devices and opens none of them.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Devices on devices: a loop file on a volume on a disk is three.
const DEPTH_MAX: usize = 8;

/// `None` when nothing is mounted at `folder`.
pub fn encrypted(folder: &Path) -> Option<bool> {
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let device = mounted_from(&table, &folder.canonicalize().ok()?)?;
    let meta = fs::metadata(device).ok()?;
    Some(is_crypt(&name(meta.rdev()), DEPTH_MAX))
}

/// The device of the last mount at this place.
fn mounted_from(table: &str, folder: &Path) -> Option<PathBuf> {
    let mut lines = table.lines().filter(|line| line.split(' ').nth(4).map(Path::new) == Some(folder));
    let rest = lines.next_back()?.split_once(" - ")?.1;
    rest.split(' ').nth(1).map(PathBuf::from)
}

/// As the kernel's folders of devices are named.
fn name(device: u64) -> String {
    format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

/// A device of dm-crypt, or one with such below it.
fn is_crypt(device: &str, depth: usize) -> bool {
    let at = Path::new("/sys/dev/block").join(device);
    if fs::read_to_string(at.join("dm/uuid")).is_ok_and(|uuid| uuid.starts_with("CRYPT-")) {
        return true;
    }
    if depth == 0 {
        return false;
    }
    let backing = fs::read_to_string(at.join("loop/backing_file")).ok();
    let backing = backing.and_then(|file| fs::metadata(file.trim_end()).ok()).map(|meta| name(meta.dev()));
    let below = fs::read_dir(at.join("slaves")).into_iter().flatten().flatten();
    let below = below.filter_map(|entry| fs::read_to_string(entry.path().join("dev")).ok());
    below.map(|device| device.trim().to_owned()).chain(backing).any(|device| is_crypt(&device, depth - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_that_of_the_last_mount() {
        let table = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                     40 22 0:30 / /data/pool rw,nosuid - btrfs /dev/loop1 rw\n\
                     41 40 0:31 / /data/pool rw shared:1 - btrfs /dev/loop2 rw,space_cache\n";
        let of = |folder: &str| mounted_from(table, Path::new(folder));
        assert_eq!(of("/data/pool"), Some("/dev/loop2".into()));
        assert_eq!(of("/data"), None);
        assert!(!is_crypt("0:0", DEPTH_MAX));
    }
}
