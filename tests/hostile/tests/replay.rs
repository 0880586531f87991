//! Every seed through its parser, and every parser in the fuzzer: what was found once is never lost again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use space_hostile::TARGETS;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a plain name")).collect()
}

#[test]
fn every_seed_is_replayed() {
    for target in TARGETS {
        (target.check)(b"");
        let made = (target.seeds)();
        assert!(made.len() >= 2, "{} has too few seeds", target.name);
        for (_, content) in &made {
            (target.check)(content);
        }
        let folder = fuzz().join("seeds").join(target.name);
        let kept = names(&folder);
        for (name, _) in &made {
            assert!(kept.contains(name), "{}: {name} is missing; run `cargo run -p space-hostile`", target.name);
        }
        for name in kept {
            let content = std::fs::read(folder.join(&name)).expect("a seed");
            assert!(content.len() <= 64 << 10, "{}: the seed {name} is larger than it need be", target.name);
            println!("{}/{name}", target.name);
            (target.check)(&content);
        }
    }
}

/// So that a target cannot be forgotten in one of the places that name it.
#[test]
fn every_target_is_fuzzed() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(targets.len(), TARGETS.len(), "two targets have one name");
    let programs: BTreeSet<String> =
        names(&fuzz().join("fuzz_targets")).iter().map(|name| name.trim_end_matches(".rs").to_owned()).collect();
    assert_eq!(programs, targets);
    assert_eq!(names(&fuzz().join("seeds")), targets);
    let manifest = std::fs::read_to_string(fuzz().join("Cargo.toml")).expect("a manifest");
    for name in &targets {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not in fuzz/Cargo.toml");
        let program = std::fs::read_to_string(fuzz().join(format!("fuzz_targets/{name}.rs"))).expect("a program");
        assert!(program.contains(&format!("\"{name}\"")), "fuzz_targets/{name}.rs fuzzes something else");
    }
}
