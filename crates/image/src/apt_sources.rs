//! Takes out of the host's package sources what belongs to one Debian suite, so that a template
//! comes from the mirror the host already uses and no mirror is written down here. Pure text
//! except for [`of_host`].

use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::error::{ImageError, IoContext, Result};

const MAX_FILE_BYTES: u64 = 1 << 20;

/// The host's sources for `suite`, its updates and its security fixes, as deb822 text.
pub(crate) fn of_host(apt_dir: &Path, suite: &str) -> Result<String> {
    let mut files = vec![apt_dir.join("sources.list")];
    if let Ok(dir) = std::fs::read_dir(apt_dir.join("sources.list.d")) {
        let mut more: Vec<PathBuf> = dir.flatten().map(|e| e.path()).collect();
        more.sort();
        files.extend(more);
    }
    let mut out = String::new();
    for path in files {
        let Ok(meta) = std::fs::metadata(&path) else {
            continue;
        };
        if !meta.is_file() || meta.len() > MAX_FILE_BYTES {
            continue;
        }
        let read = || std::fs::read_to_string(&path).ctx(|| format!("read {}", path.display()));
        match path.extension().and_then(|e| e.to_str()) {
            Some("list") => one_line(&read()?, suite, &mut out),
            Some("sources") => deb822(&read()?, suite, &mut out),
            _ => {}
        }
    }
    // Third-party sources often use the same suite name; without the distribution itself nothing
    // can be built.
    if !out.contains(&format!("\nSuites: {suite}\n")) && !out.contains(&format!("Suites: {suite} ")) {
        return Err(ImageError::NoAptSource { suite: suite.to_owned() });
    }
    Ok(out)
}

fn wanted(name: &str, suite: &str) -> bool {
    name.strip_prefix(suite).is_some_and(|rest| matches!(rest, "" | "-updates" | "-security" | "/updates"))
}

fn one_line(text: &str, suite: &str, out: &mut String) {
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or("").trim();
        let Some(rest) = line.strip_prefix("deb ") else {
            continue;
        };
        let rest = rest.trim_start();
        let (options, rest) = match rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            Some((options, rest)) => (options, rest),
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (Some(uri), Some(name)) = (words.next(), words.next()) else {
            continue;
        };
        let components: Vec<&str> = words.collect();
        if !wanted(name, suite) || !components.contains(&"main") {
            continue;
        }
        let signed = options.split_whitespace().find_map(|o| o.strip_prefix("signed-by="));
        stanza(out, uri, name, &components.join(" "), signed);
    }
}

fn deb822(text: &str, suite: &str, out: &mut String) {
    let mut block: Vec<String> = Vec::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if !line.trim().is_empty() {
            block.push(line.to_owned());
            continue;
        }
        one_block(&std::mem::take(&mut block), suite, out);
    }
}

fn one_block(block: &[String], suite: &str, out: &mut String) {
    let field = |name: &str| -> Option<String> {
        let at = block.iter().position(|l| l.split_once(':').is_some_and(|(k, _)| k.eq_ignore_ascii_case(name)))?;
        let mut value = block[at].split_once(':')?.1.trim().to_owned();
        for more in block[at + 1..].iter().take_while(|l| l.starts_with([' ', '\t'])) {
            value.push('\n');
            value.push_str(more);
        }
        Some(value)
    };
    let (Some(types), Some(uris), Some(suites), Some(components)) =
        (field("Types"), field("URIs"), field("Suites"), field("Components"))
    else {
        return;
    };
    let off = field("Enabled").is_some_and(|e| e.eq_ignore_ascii_case("no"));
    let names: Vec<&str> = suites.split_whitespace().filter(|s| wanted(s, suite)).collect();
    let has = |text: &str, word: &str| text.split_whitespace().any(|w| w == word);
    if off || !has(&types, "deb") || !has(&components, "main") || names.is_empty() {
        return;
    }
    let uris = uris.split_whitespace().collect::<Vec<_>>().join(" ");
    stanza(
        out,
        &uris,
        &names.join(" "),
        &components.split_whitespace().collect::<Vec<_>>().join(" "),
        field("Signed-By").as_deref(),
    );
}

fn stanza(out: &mut String, uris: &str, suites: &str, components: &str, signed: Option<&str>) {
    let _ = write!(out, "Types: deb\nURIs: {uris}\nSuites: {suites}\nComponents: {components}\n");
    if let Some(signed) = signed {
        let _ = writeln!(out, "Signed-By: {signed}");
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_and_only_the_suite() {
        let dir = tempfile::tempdir().unwrap();
        let more = dir.path().join("sources.list.d");
        std::fs::create_dir(&more).unwrap();
        std::fs::write(
            dir.path().join("sources.list"),
            "deb [arch=amd64 signed-by=/k.gpg] http://m.test/d one main extra # note\n\
             deb-src http://m.test/d one main\ndeb http://other.test/x two main\n",
        )
        .unwrap();
        std::fs::write(
            more.join("d.sources"),
            "Types: deb deb-src\nURIs: http://s.test/d\nSuites: one-security two\n\
             Components: main\nSigned-By:\n -----BEGIN\n .\n -----END\n\n\
             Types: deb\nURIs: http://vendor.test/v\nSuites: one-vendor\nComponents: main\n\n\
             Enabled: no\nTypes: deb\nURIs: http://off.test/v\nSuites: one\nComponents: main\n",
        )
        .unwrap();
        std::fs::write(more.join("x.list.disabled"), "deb http://dis.test one main\n").unwrap();
        let text = of_host(dir.path(), "one").unwrap();
        assert_eq!(
            text,
            "Types: deb\nURIs: http://m.test/d\nSuites: one\nComponents: main extra\n\
             Signed-By: /k.gpg\n\n\
             Types: deb\nURIs: http://s.test/d\nSuites: one-security\nComponents: main\n\
             Signed-By: \n -----BEGIN\n .\n -----END\n\n"
        );
        assert!(matches!(of_host(dir.path(), "three"), Err(ImageError::NoAptSource { .. })));
    }
}
