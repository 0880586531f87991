//! Reads a tar stream entry by entry: ustar, GNU (long names, old sparse) and PAX (long names,
//! times, ids, sizes, xattrs, sparse 0.0, 0.1 and 1.0). Written for hostile input: all that is
//! kept in memory has a limit, which a general reader that collects long names first does not
//! give. Must never touch the file system.

use std::io::Read;

use tar::{EntryType, Header};

use crate::error::{ImageError, IoContext, Result};

const BLOCK: usize = 512;
/// Extended headers of one entry together.
pub const MAX_PAX_BYTES: u64 = 1 << 20;
pub const MAX_LONG_NAME_BYTES: u64 = 64 << 10;
/// Data ranges of one sparse file.
pub const MAX_SPARSE_RANGES: usize = 1 << 18;
pub const MAX_XATTRS: usize = 64;

/// What an entry is; sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    HardLink,
    Symlink,
    Char,
    Block,
    Dir,
    Fifo,
}

/// What a header and the records before it say.
#[derive(Debug)]
pub struct Entry {
    pub kind: Kind,
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    /// Size of the file once written, holes included.
    pub size: u64,
    /// Where the payload goes, in order, not overlapping: (offset, length).
    pub ranges: Vec<(u64, u64)>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since 1970 and nanoseconds.
    pub mtime: (i64, u32),
    pub device: (u32, u32),
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The archive, read once from front to end.
pub struct TarReader<R> {
    inner: R,
    /// Payload of the current entry still in the stream.
    left: u64,
    /// Filling after the payload.
    padding: u64,
}

/// What `x`, `L` and `K` records said about the entry after them.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse: Sparse,
}

#[derive(Default)]
struct Sparse {
    major: Option<u64>,
    name: Option<Vec<u8>>,
    real_size: Option<u64>,
    /// Offset, length, offset, length … (formats 0.0 and 0.1).
    numbers: Vec<u64>,
}

impl<R: Read> TarReader<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, left: 0, padding: 0 }
    }

    /// Gives the stream back, so that what follows the archive can be drained and hashed.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The next entry, or `None` at the end. Payload not read before is skipped.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut extended = Extended::default();
        loop {
            self.skip_rest()?;
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            let size = number(header.entry_size(), "size")?;
            match header.entry_type() {
                EntryType::XHeader => {
                    let data = self.record(size, MAX_PAX_BYTES)?;
                    parse_pax(&data, &mut extended)?;
                }
                EntryType::XGlobalHeader => {
                    // Comments of archivers (a commit id, say); nothing an entry depends on.
                    self.record(size, MAX_PAX_BYTES)?;
                }
                EntryType::GNULongName => {
                    extended.path = Some(until_nul(self.record(size, MAX_LONG_NAME_BYTES)?));
                }
                EntryType::GNULongLink => {
                    extended.link = Some(until_nul(self.record(size, MAX_LONG_NAME_BYTES)?));
                }
                _ => return self.entry(&header, extended).map(Some),
            }
        }
    }

    fn entry(&mut self, header: &Header, mut extended: Extended) -> Result<Entry> {
        let mut path =
            extended.sparse.name.take().or(extended.path.take()).unwrap_or_else(|| header.path_bytes().into_owned());
        let kind = match header.entry_type() {
            // Before 1988 a directory was a file whose name ends in a slash.
            EntryType::Regular | EntryType::Continuous if path.ends_with(b"/") => Kind::Dir,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => Kind::File,
            EntryType::Link => Kind::HardLink,
            EntryType::Symlink => Kind::Symlink,
            EntryType::Char => Kind::Char,
            EntryType::Block => Kind::Block,
            EntryType::Directory => Kind::Dir,
            EntryType::Fifo => Kind::Fifo,
            other => {
                return Err(ImageError::archive(format!("entry type 0x{:02x} is not known", other.as_byte())));
            }
        };
        while path.len() > 1 && path.ends_with(b"/") {
            path.pop();
        }
        let stored = if kind == Kind::File {
            extended.size.map_or_else(|| number(header.entry_size(), "size"), Ok)?
        } else {
            0
        };
        self.start_payload(stored)?;
        let (size, ranges) = self.layout(header, kind, stored, &extended.sparse)?;
        let device =
            (header.device_major().ok().flatten().unwrap_or(0), header.device_minor().ok().flatten().unwrap_or(0));
        Ok(Entry {
            kind,
            path,
            link: extended.link.unwrap_or_else(|| header.link_name_bytes().map(|l| l.into_owned()).unwrap_or_default()),
            size,
            ranges,
            mode: header.mode().map_err(bad("mode"))? & 0o7777,
            uid: id(extended.uid, header.uid(), "uid")?,
            gid: id(extended.gid, header.gid(), "gid")?,
            mtime: match extended.mtime {
                Some(t) => t,
                None => (i64::try_from(number(header.mtime(), "mtime")?).unwrap_or(0), 0),
            },
            device,
            xattrs: extended.xattrs,
        })
    }

    /// Reads payload of the current entry.
    pub fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
        let want = buf.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let n = self.inner.read(&mut buf[..want]).ctx(|| "read the archive".into())?;
        if n == 0 {
            return Err(ImageError::archive("it ends in the middle of a file"));
        }
        self.left -= n as u64;
        Ok(n)
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> Result<()> {
        let mut at = 0;
        while at < buf.len() {
            match self.read(&mut buf[at..])? {
                0 => return Err(ImageError::archive("a record is shorter than it says")),
                n => at += n,
            }
        }
        Ok(())
    }

    fn start_payload(&mut self, size: u64) -> Result<()> {
        if size > i64::MAX as u64 {
            return Err(ImageError::archive("an entry has an impossible size"));
        }
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        Ok(())
    }

    fn record(&mut self, size: u64, max: u64) -> Result<Vec<u8>> {
        if size > max {
            return Err(ImageError::LimitExceeded { what: "the size of an extended header", limit: max });
        }
        self.start_payload(size)?;
        let mut data = vec![0; usize::try_from(size).map_err(ImageError::archive)?];
        self.read_exact(&mut data)?;
        Ok(data)
    }

    fn skip_rest(&mut self) -> Result<()> {
        self.left += self.padding;
        self.padding = 0;
        let mut sink = [0u8; 16 << 10];
        while self.left > 0 {
            self.read(&mut sink)?;
        }
        Ok(())
    }

    /// A checked header; `None` at the end of the archive (zero block, or end of stream between
    /// entries, which some writers leave).
    fn header(&mut self) -> Result<Option<Header>> {
        let mut block = [0u8; BLOCK];
        let mut at = 0;
        while at < BLOCK {
            match self.inner.read(&mut block[at..]).ctx(|| "read the archive".into())? {
                0 if at == 0 => return Ok(None),
                0 => return Err(ImageError::archive("it ends in the middle of a header")),
                n => at += n,
            }
        }
        if block.iter().all(|b| *b == 0) {
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block).clone();
        let sum: u32 =
            block.iter().enumerate().map(|(i, b)| u32::from(if (148..156).contains(&i) { b' ' } else { *b })).sum();
        if header.cksum().map_err(bad("checksum"))? != sum {
            return Err(ImageError::archive("a header has a wrong checksum"));
        }
        Ok(Some(header))
    }

    /// Final size of a file and where its payload goes.
    fn layout(&mut self, header: &Header, kind: Kind, stored: u64, sparse: &Sparse) -> Result<(u64, Vec<(u64, u64)>)> {
        if kind != Kind::File {
            return Ok((0, Vec::new()));
        }
        let (size, ranges) = if header.entry_type() == EntryType::GNUSparse {
            self.old_gnu_map(header)?
        } else if sparse.major == Some(1) {
            let size = sparse.real_size.ok_or_else(|| ImageError::archive("a sparse file has no size"))?;
            (size, self.pax_1_map()?)
        } else if let Some(size) = sparse.real_size {
            let ranges = sparse.numbers.chunks_exact(2).map(|c| (c[0], c[1]));
            (size, ranges.collect())
        } else {
            return Ok((stored, vec![(0, stored)]));
        };
        let mut end = 0u64;
        let mut sum = 0u64;
        for (offset, len) in &ranges {
            let next = offset.checked_add(*len);
            if *offset < end || next.is_none_or(|n| n > size) {
                return Err(ImageError::archive("a sparse file has an impossible map"));
            }
            end = next.unwrap_or(u64::MAX);
            sum += len;
        }
        if sum != self.left {
            return Err(ImageError::archive("the map of a sparse file does not match its data"));
        }
        Ok((size, ranges))
    }

    fn old_gnu_map(&mut self, header: &Header) -> Result<(u64, Vec<(u64, u64)>)> {
        let gnu = header.as_gnu().ok_or_else(|| ImageError::archive("a sparse entry without a GNU header"))?;
        let mut ranges = Vec::new();
        let mut add = |list: &[tar::GnuSparseHeader]| -> Result<()> {
            for piece in list.iter().filter(|p| !p.is_empty()) {
                if ranges.len() >= MAX_SPARSE_RANGES {
                    return Err(too_many_ranges());
                }
                ranges.push((number(piece.offset(), "sparse offset")?, number(piece.length(), "sparse length")?));
            }
            Ok(())
        };
        add(&gnu.sparse)?;
        let mut more = gnu.is_extended();
        while more {
            // These blocks stand between the header and the payload and are not counted in it.
            let mut ext = tar::GnuExtSparseHeader::new();
            let payload = std::mem::replace(&mut self.left, BLOCK as u64);
            self.read_exact(ext.as_mut_bytes())?;
            self.left = payload;
            add(ext.sparse())?;
            more = ext.is_extended();
        }
        Ok((number(gnu.real_size(), "size")?, ranges))
    }

    /// The map stands as decimal lines in whole blocks before the data.
    fn pax_1_map(&mut self) -> Result<Vec<(u64, u64)>> {
        let mut numbers: Vec<u64> = Vec::new();
        let mut wanted: Option<usize> = None;
        let mut digits = String::new();
        loop {
            let mut block = [0u8; BLOCK];
            self.read_exact(&mut block)?;
            for b in block {
                match b {
                    b'0'..=b'9' if digits.len() < 20 => digits.push(char::from(b)),
                    b'\n' => {
                        let value = decimal(digits.as_bytes())?;
                        digits.clear();
                        if wanted.is_none() {
                            let count = usize::try_from(value).unwrap_or(usize::MAX);
                            if count > MAX_SPARSE_RANGES {
                                return Err(too_many_ranges());
                            }
                            wanted = Some(count * 2);
                        } else {
                            numbers.push(value);
                        }
                        if wanted == Some(numbers.len()) {
                            return Ok(numbers.chunks_exact(2).map(|c| (c[0], c[1])).collect());
                        }
                    }
                    _ => return Err(ImageError::archive("a damaged sparse map")),
                }
            }
        }
    }
}

fn too_many_ranges() -> ImageError {
    ImageError::LimitExceeded { what: "the number of ranges of a sparse file", limit: MAX_SPARSE_RANGES as u64 }
}

fn bad(what: &'static str) -> impl FnOnce(std::io::Error) -> ImageError {
    move |e| ImageError::archive(format!("the {what} of an entry is damaged: {e}"))
}

fn number(value: std::io::Result<u64>, what: &'static str) -> Result<u64> {
    value.map_err(bad(what))
}

fn id(pax: Option<u32>, header: std::io::Result<u64>, what: &'static str) -> Result<u32> {
    match pax {
        Some(id) => Ok(id),
        None => u32::try_from(number(header, what)?)
            .map_err(|_| ImageError::archive(format!("the {what} of an entry is too large"))),
    }
}

fn until_nul(mut data: Vec<u8>) -> Vec<u8> {
    if let Some(end) = data.iter().position(|b| *b == 0) {
        data.truncate(end);
    }
    data
}

fn decimal(text: &[u8]) -> Result<u64> {
    std::str::from_utf8(text)
        .ok()
        .and_then(|t| t.parse().ok())
        .ok_or_else(|| ImageError::archive("a number in an extended header is damaged"))
}

/// `len key=value\n` records; values may hold any byte, so they are cut by length only.
fn parse_pax(mut data: &[u8], out: &mut Extended) -> Result<()> {
    let damaged = || ImageError::archive("a damaged extended header");
    while !data.is_empty() && data[0] != 0 {
        let space = data.iter().position(|b| *b == b' ').ok_or_else(damaged)?;
        let len = usize::try_from(decimal(&data[..space])?).map_err(|_| damaged())?;
        if len <= space + 1 || len > data.len() || data[len - 1] != b'\n' {
            return Err(damaged());
        }
        let record = &data[space + 1..len - 1];
        data = &data[len..];
        let eq = record.iter().position(|b| *b == b'=').ok_or_else(damaged)?;
        pax_record(&record[..eq], &record[eq + 1..], out)?;
    }
    Ok(())
}

fn pax_record(key: &[u8], value: &[u8], out: &mut Extended) -> Result<()> {
    match key {
        // An empty value means: as if this record had never been there.
        b"path" => out.path = Some(value.to_vec()).filter(|v| !v.is_empty()),
        b"linkpath" => out.link = Some(value.to_vec()).filter(|v| !v.is_empty()),
        b"size" => out.size = Some(decimal(value)?),
        b"uid" => out.uid = u32::try_from(decimal(value)?).ok(),
        b"gid" => out.gid = u32::try_from(decimal(value)?).ok(),
        b"mtime" => out.mtime = Some(pax_time(value)?),
        b"GNU.sparse.major" => out.sparse.major = Some(decimal(value)?),
        b"GNU.sparse.name" => out.sparse.name = Some(value.to_vec()),
        b"GNU.sparse.realsize" | b"GNU.sparse.size" => {
            out.sparse.real_size = Some(decimal(value)?);
        }
        b"GNU.sparse.map" => {
            for piece in value.split(|b| *b == b',') {
                out.sparse.push(decimal(piece)?)?;
            }
        }
        b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => out.sparse.push(decimal(value)?)?,
        _ => {
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                if out.xattrs.len() >= MAX_XATTRS {
                    return Err(ImageError::LimitExceeded {
                        what: "the number of extended attributes of a file",
                        limit: MAX_XATTRS as u64,
                    });
                }
                out.xattrs.push((name.to_vec(), value.to_vec()));
            }
        }
    }
    Ok(())
}

impl Sparse {
    fn push(&mut self, number: u64) -> Result<()> {
        if self.numbers.len() >= 2 * MAX_SPARSE_RANGES {
            return Err(too_many_ranges());
        }
        self.numbers.push(number);
        Ok(())
    }
}

/// Seconds with an optional sign and fraction.
fn pax_time(value: &[u8]) -> Result<(i64, u32)> {
    let damaged = || ImageError::archive("a time in an extended header is damaged");
    let text = std::str::from_utf8(value).map_err(|_| damaged())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| damaged())?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(damaged());
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: u32 = digits.parse().map_err(|_| damaged())?;
    if whole.starts_with('-') && nanos > 0 {
        return Ok((seconds.saturating_sub(1), 1_000_000_000 - nanos));
    }
    Ok((seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(pax_time(b"12.5").unwrap(), (12, 500_000_000));
        assert_eq!(pax_time(b"-1.25").unwrap(), (-2, 750_000_000));
        assert_eq!(pax_time(b"7").unwrap(), (7, 0));
        assert!(pax_time(b"1.x").is_err());
    }

    #[test]
    fn values_with_newlines_survive() {
        let mut out = Extended::default();
        let body = b"SCHILY.xattr.user.a=x\ny\0z\n";
        let mut record = format!("{} ", body.len() + 3).into_bytes();
        record.extend_from_slice(body);
        parse_pax(&record, &mut out).unwrap();
        assert_eq!(out.xattrs, [(b"user.a".to_vec(), b"x\ny\0z".to_vec())]);
    }

    #[test]
    fn damaged_records_are_errors_not_panics() {
        for bad in [&b"5 a"[..], b"0 a=b\n", b"999999999999999999999 a=b\n", b"6 a=bc", b"x"] {
            assert!(parse_pax(bad, &mut Extended::default()).is_err());
        }
    }
}
