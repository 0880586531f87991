//! Builds a disk from the command line: `build SOURCE WORK_DIR DISK [MIB]`. For trying sources by
//! hand; prints what a template would record.

use std::time::Instant;

use space_image::{BuildRequest, DiskOptions, Progress, RegistryOptions, build};

struct Print;

impl Progress for Print {
    fn step(&self, text: &str) {
        eprintln!("* {text}");
    }
    fn bytes(&self, _done: u64, _total: Option<u64>) {}
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, work, disk, rest @ ..] = &args[..] else {
        return Err("usage: build SOURCE WORK_DIR DISK [MIB]".into());
    };
    let mib: u64 = rest.first().map_or(Ok(2048), |m| m.parse())?;
    let start = Instant::now();
    let built = build(
        &BuildRequest {
            source: source.parse()?,
            work_dir: work.into(),
            disk_path: disk.into(),
            disk: DiskOptions::new(mib << 20, uuid::Uuid::from_u128(1), uuid::Uuid::from_u128(2)),
            registry: RegistryOptions::default(),
        },
        &Print,
    )?;
    eprintln!("built in {:.1?}", start.elapsed());
    let start = Instant::now();
    let digest = space_image::digest::file_sha256_sparse(disk.as_ref(), &Print)?;
    eprintln!("digest {digest} in {:.1?}", start.elapsed());
    println!("{}", serde_json::to_string_pretty(&built.config)?);
    println!("{:?} {:?}", built.user, built.image_digest);
    Ok(())
}
