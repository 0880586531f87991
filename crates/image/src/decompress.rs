//! Opens a compressed stream by what its first bytes say, never by a media type or a file name
//! that someone else wrote.

use std::fs::File;
use std::io::{BufReader, Chain, Cursor, Read, Seek, SeekFrom};
use std::time::Duration;

use crate::error::{ImageError, IoContext, Result};
use crate::tool::Tool;

/// zstd frames may ask for more; 128 MiB is what every decoder grants by default.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

type Peeked<R> = Chain<Cursor<Vec<u8>>, R>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Plain,
    Gzip,
    Zstd,
    Xz,
}

fn format_of(start: &[u8]) -> Format {
    if start.starts_with(&[0x1f, 0x8b]) {
        Format::Gzip
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Format::Zstd
    } else if start.starts_with(&[0xfd, b'7', b'z', b'X', b'Z', 0]) {
        Format::Xz
    } else {
        Format::Plain
    }
}

fn peek<R: Read>(mut from: R) -> Result<(Format, Peeked<R>)> {
    let mut start = Vec::with_capacity(6);
    from.by_ref().take(6).read_to_end(&mut start).ctx(|| "read the archive".into())?;
    let format = format_of(&start);
    Ok((format, Cursor::new(start).chain(from)))
}

/// A layer: plain, gzip or zstd.
pub fn stream<'a, R: Read + 'a>(from: R) -> Result<Box<dyn Read + 'a>> {
    let (format, whole) = peek(from)?;
    match format {
        Format::Plain => Ok(Box::new(whole)),
        Format::Gzip => Ok(Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(128 << 10, whole)))),
        Format::Zstd => {
            let mut decoder = zstd::Decoder::new(whole).ctx(|| "start zstd".into())?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).ctx(|| "start zstd".into())?;
            Ok(Box::new(decoder))
        }
        Format::Xz => Err(ImageError::archive("a layer compressed with xz is not allowed in an image")),
    }
}

/// A file the user named: the above, and xz through the host's program.
pub fn file(mut file: File) -> Result<Box<dyn Read>> {
    let mut start = [0u8; 6];
    let n = file.read(&mut start).ctx(|| "read the archive".into())?;
    file.seek(SeekFrom::Start(0)).ctx(|| "rewind the archive".into())?;
    if format_of(&start[..n]) == Format::Xz {
        let xz = Tool::new("/usr/bin/xz", "xz-utils")
            .args(["--decompress", "--stdout", "--memlimit-decompress=256MiB"])
            .timeout(Duration::from_secs(3600));
        return Ok(Box::new(xz.filter(file)?));
    }
    stream(file)
}
