//! What a compiler does not check: length and head of files, unfinished marks, licences, and documents that keep up with the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{output_of, root};

/// Lines of a source file up to its unit tests.
const FILE_LINES_MAX: usize = 500;
const TEXT_EXTENSIONS: [&str; 8] = ["rs", "toml", "md", "proto", "sql", "sh", "yml", "json"];

/// Marks of unfinished work and traces of one person's machine; put together here so that this file is not among them.
fn forbidden() -> Vec<String> {
    [
        ("TO", "DO"),
        ("FIX", "ME"),
        ("XX", "X:"),
        ("/wo", "rk/"),
        ("/home/", "runner"),
        ("unimplemented", "!("),
        ("dbg", "!("),
    ]
    .map(|(a, b)| format!("{a}{b}"))
    .to_vec()
}

/// Files that git knows or would add.
fn files() -> Result<Vec<PathBuf>> {
    let args = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let list = output_of(Command::new("git").args(args).current_dir(root()))?;
    Ok(list.lines().map(PathBuf::from).filter(|path| root().join(path).is_file()).collect())
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or("")
}

fn check_source(path: &Path, text: &str, faults: &mut Vec<String>) {
    let production = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(text);
    let lines = production.lines().count();
    if lines > FILE_LINES_MAX {
        faults.push(format!("{}: {lines} lines without tests; split it (at most {FILE_LINES_MAX})", path.display()));
    }
    let head = text.lines().find(|line| !line.starts_with("#!") && !line.trim().is_empty()).unwrap_or("");
    if !head.starts_with("//!") {
        faults.push(format!("{}: no `//!` at the head: say what it is for and what it must never do", path.display()));
    }
}

fn check_texts(files: &[PathBuf], faults: &mut Vec<String>) -> Result<()> {
    let forbidden = forbidden();
    for path in files {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        if !TEXT_EXTENSIONS.contains(&extension(path)) && !matches!(name, "Makefile" | "run") {
            continue;
        }
        let text = fs::read_to_string(root().join(path)).with_context(|| path.display().to_string())?;
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = forbidden.iter().find(|word| line.contains(word.as_str())) {
                faults.push(format!("{}:{}: {word:?} must not stand here", path.display(), number + 1));
            }
        }
        if extension(path) == "rs" {
            check_source(path, &text, faults);
        }
    }
    Ok(())
}

/// Everything people read, in one text.
fn documents(files: &[PathBuf]) -> Result<String> {
    let mut all = String::new();
    for path in files.iter().filter(|path| extension(path) == "md") {
        all += &fs::read_to_string(root().join(path))?;
    }
    Ok(all)
}

/// Each command of the program and each variable it reads must be named in a document.
fn check_documents(files: &[PathBuf], faults: &mut Vec<String>) -> Result<()> {
    let documents = documents(files)?;
    for path in files {
        let Ok(inside) = path.strip_prefix("crates/cli/src/cmd") else { continue };
        let name = inside.file_stem().and_then(|n| n.to_str()).unwrap_or("");
        if inside.components().count() == 1 && name != "mod" && !documents.contains(&format!("space {name}")) {
            faults.push(format!("no document mentions `space {name}`"));
        }
    }
    let registry = fs::read_to_string(root().join("crates/cli/src/env.rs"))?;
    for name in registry.split('"').filter(|word| word.starts_with("SPACE_") && !word.contains(' ')) {
        if !documents.contains(name) {
            faults.push(format!("no document mentions the variable {name}"));
        }
    }
    Ok(())
}

fn metadata() -> Result<Value> {
    let text =
        output_of(Command::new("cargo").args(["metadata", "--format-version", "1", "--locked"]).current_dir(root()))?;
    Ok(serde_json::from_str(&text)?)
}

/// Every direct dependency that is not ours stands in docs/dependencies.md.
fn check_dependencies(metadata: &Value, faults: &mut Vec<String>) -> Result<()> {
    let table = fs::read_to_string(root().join("docs/dependencies.md"))?;
    let listed: BTreeSet<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix('|')?.split('|').next())
        .flat_map(|cell| cell.split(','))
        .map(|name| name.trim().trim_matches('`'))
        .collect();
    let mut needed = BTreeSet::new();
    for package in metadata["packages"].as_array().context("no packages")?.iter().filter(|p| p["source"].is_null()) {
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            if !dependency["source"].is_null() {
                needed.insert(dependency["name"].as_str().unwrap_or("").to_owned());
            }
        }
    }
    for name in needed.iter().filter(|name| !listed.contains(name.as_str())) {
        faults.push(format!("docs/dependencies.md does not say why {name} is there"));
    }
    Ok(())
}

/// Whether one alternative of an SPDX expression is made of allowed licences only.
fn licence_is_allowed(expression: &str, allowed: &[String]) -> bool {
    let flat = expression.replace(['(', ')'], " ").replace('/', " OR ");
    // AND binds tighter; parentheses around an OR inside an AND are read too strictly, never too loosely.
    let term = |term: &str| allowed.iter().any(|licence| licence == term.trim());
    let all = |alternative: &str| alternative.split(" AND ").all(term);
    let each_part_has_one =
        |expression: &str| expression.split(" AND ").all(|part| part.replace(['(', ')'], " ").split(" OR ").any(term));
    if expression.contains('(') { each_part_has_one(expression) } else { flat.split(" OR ").any(all) }
}

fn check_licences(metadata: &Value, faults: &mut Vec<String>) -> Result<()> {
    let deny: toml::Table = toml::from_str(&fs::read_to_string(root().join("deny.toml"))?)?;
    let allowed: Vec<String> = deny["licenses"]["allow"]
        .as_array()
        .context("deny.toml: licenses.allow")?
        .iter()
        .filter_map(|licence| licence.as_str().map(str::to_owned))
        .collect();
    for package in metadata["packages"].as_array().context("no packages")? {
        let name = package["name"].as_str().unwrap_or("");
        let licence = package["license"].as_str().unwrap_or("");
        if !licence_is_allowed(licence, &allowed) {
            faults.push(format!("{name}: the licence {licence:?} is not on the list of deny.toml"));
        }
    }
    let own = fs::read_to_string(root().join("LICENSE")).context("LICENSE")?;
    if !own.contains("Apache License") {
        faults.push("LICENSE is not the Apache licence".into());
    }
    Ok(())
}

/// Names and versions in a lock file.
fn locked(path: &str) -> Result<BTreeSet<(String, String)>> {
    let lock: toml::Table = toml::from_str(&fs::read_to_string(root().join(path))?).with_context(|| path.to_owned())?;
    let word = |package: &toml::Value, key: &str| package.get(key).and_then(|v| v.as_str()).unwrap_or("").to_owned();
    let packages = lock["package"].as_array().context("no packages")?;
    Ok(packages.iter().map(|package| (word(package, "name"), word(package, "version"))).collect())
}

/// What is fuzzed is what is shipped: a crate of both workspaces has one version.
fn check_locks(faults: &mut Vec<String>) -> Result<()> {
    let own = locked("Cargo.lock")?;
    let names: BTreeSet<&str> = own.iter().map(|(name, _)| name.as_str()).collect();
    for (name, version) in locked("fuzz/Cargo.lock")?.difference(&own).filter(|(name, _)| names.contains(name.as_str()))
    {
        faults.push(format!("fuzz/Cargo.lock: {name} {version} is not the version in Cargo.lock"));
    }
    Ok(())
}

pub fn run() -> Result<()> {
    let files = files()?;
    let mut faults = Vec::new();
    check_texts(&files, &mut faults)?;
    check_documents(&files, &mut faults)?;
    let metadata = metadata()?;
    check_dependencies(&metadata, &mut faults)?;
    check_licences(&metadata, &mut faults)?;
    check_locks(&mut faults)?;
    if faults.is_empty() {
        println!("tidy: {} files, nothing to say", files.len());
        return Ok(());
    }
    bail!("tidy: {} faults\n  {}", faults.len(), faults.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences() {
        let allowed = ["MIT", "Apache-2.0", "Unicode-3.0", "Zlib"].map(str::to_owned);
        for good in
            ["MIT", "MIT OR Apache-2.0", "MIT/Apache-2.0", "GPL-2.0 OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"]
        {
            assert!(licence_is_allowed(good, &allowed), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-2.0", "(MIT OR Zlib) AND GPL-2.0"] {
            assert!(!licence_is_allowed(bad, &allowed), "{bad}");
        }
    }

    #[test]
    fn long_and_headless_files_are_found() {
        let mut faults = Vec::new();
        check_source(Path::new("a.rs"), &"x\n".repeat(501), &mut faults);
        assert_eq!(faults.len(), 2, "{faults:?}");
        check_source(Path::new("b.rs"), "//! Fine.\n", &mut faults);
        assert_eq!(faults.len(), 2, "{faults:?}");
    }
}
