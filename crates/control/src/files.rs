//! Small files of the control plane: secrets that are written whole or not at all, and readable by their owner only.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use crate::ControlError;

/// A secret file is never longer than this.
const SECRET_MAX_BYTES: u64 = 4096;

fn failed<'a>(act: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> ControlError + 'a {
    move |source| ControlError::File { act, path: path.to_owned(), source }
}

/// Writes `bytes` with mode 0600: temporary file, fsync, rename, fsync of the folder.
pub fn write_secret(path: &Path, bytes: &[u8]) -> Result<(), ControlError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(failed("make the folder", dir))?;
    let temp = path.with_extension(format!("new.{}", std::process::id()));
    let _ = std::fs::remove_file(&temp);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temp)
        .map_err(failed("create", &temp))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if let Err(source) = written.and_then(|()| std::fs::rename(&temp, path)) {
        let _ = std::fs::remove_file(&temp);
        return Err(failed("write", path)(source));
    }
    std::fs::File::open(dir).and_then(|d| d.sync_all()).map_err(failed("sync the folder", dir))
}

/// The content, or `None` when there is no such file. Takes away what others could read of it.
pub fn read_secret(path: &Path) -> Result<Option<Vec<u8>>, ControlError> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("open", path)(source)),
    };
    let mode = file.metadata().map_err(failed("examine", path))?.permissions().mode();
    if mode & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(failed("protect", path))?;
    }
    let mut bytes = Vec::new();
    file.take(SECRET_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed("read", path))?;
    if bytes.len() as u64 > SECRET_MAX_BYTES {
        return Err(ControlError::BadSecret { path: path.to_owned(), why: "too long" });
    }
    Ok(Some(bytes))
}
