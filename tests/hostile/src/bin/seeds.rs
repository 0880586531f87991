//! Writes the seeds of all targets into `fuzz/seeds`, over the ones that are there: after a change of a format. What a
//! fuzzer found and was kept stays.

use std::path::Path;

fn main() -> std::io::Result<()> {
    for target in space_hostile::TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (name, content) in (target.seeds)() {
            std::fs::write(folder.join(name), content)?;
        }
    }
    Ok(())
}
