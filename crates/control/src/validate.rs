//! What a request may contain. Everything is checked before anything is written; an error names the field.

use std::collections::BTreeMap;

use space_api::problem::Code;
use space_api::{BuildTemplate, CreateCommand, CreateSandbox, Problem, TerminalSize};
use space_core::limits;
use space_core::name::{TemplateRef, check_metadata_key, check_sandbox_name};

type Checked<T = ()> = Result<T, Problem>;

/// User names and `uid:gid`.
const USER_MAX_BYTES: usize = 64;
const SOURCE_MAX_BYTES: usize = 4096;
const SHELL_MAX_BYTES: usize = 64 * 1024;
const READY_MAX_SECONDS: u64 = 3600;
const TIMEOUT_MAX_SECONDS: u64 = 365 * 24 * 3600;
const TERMINAL_MAX: u16 = 4096;
const KEY_NAME_MAX_BYTES: usize = 128;

pub fn invalid(field: &str, detail: impl Into<String>) -> Problem {
    Problem::new(Code::InvalidRequest, detail).at(field)
}

fn within(field: &str, value: u64, min: u64, max: u64, unit: &str) -> Checked {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(invalid(field, format!("{field} must be {min} to {max} {unit}, got {value}")))
}

pub fn sandbox_name(name: &str) -> Checked {
    check_sandbox_name(name).map_err(|e| invalid("name", e.to_string()))
}

pub fn template_ref(field: &str, text: &str) -> Checked<TemplateRef> {
    text.parse().map_err(|e: space_core::name::InvalidName| invalid(field, e.to_string()))
}

pub fn metadata_pair(key: &str, value: Option<&str>) -> Checked {
    check_metadata_key(key).map_err(|e| invalid("metadata", e.to_string()))?;
    let Some(value) = value else { return Ok(()) };
    if value.len() > limits::METADATA_VALUE_MAX_BYTES {
        let max = limits::METADATA_VALUE_MAX_BYTES;
        return Err(invalid(
            &format!("metadata.{key}"),
            format!("a metadata value has at most {max} bytes, got {}", value.len()),
        ));
    }
    if value.contains('\0') {
        return Err(invalid(&format!("metadata.{key}"), "a metadata value has no NUL character"));
    }
    Ok(())
}

pub fn too_much_metadata() -> Problem {
    invalid("metadata", format!("at most {} metadata keys", limits::METADATA_KEYS_MAX))
}

pub fn env(field: &str, env: &BTreeMap<String, String>) -> Checked {
    if env.len() > limits::ENV_VARS_MAX {
        return Err(invalid(
            field,
            format!("at most {} environment variables, got {}", limits::ENV_VARS_MAX, env.len()),
        ));
    }
    let mut total = 0;
    for (name, value) in env {
        if name.is_empty() || name.contains('=') || name.contains('\0') {
            let shown: String = name.chars().take(80).collect();
            return Err(invalid(
                field,
                format!("{shown:?} is no name of an environment variable: not empty, without = and NUL"),
            ));
        }
        if value.contains('\0') {
            let shown: String = name.chars().take(80).collect();
            return Err(invalid(field, format!("the value of {shown} has a NUL character; the kernel passes none")));
        }
        total += name.len() + value.len() + 2;
    }
    let max = limits::ENV_TOTAL_MAX_BYTES;
    if total > max {
        return Err(invalid(field, format!("the environment has {total} bytes, at most {max} fit")));
    }
    Ok(())
}

pub fn user(field: &str, user: Option<&str>) -> Checked {
    let Some(user) = user else { return Ok(()) };
    let good = |c: char| c.is_ascii_alphanumeric() || "._-:$@".contains(c);
    if user.is_empty() || user.len() > USER_MAX_BYTES || user.starts_with('-') || !user.chars().all(good) {
        return Err(invalid(field, "a user is a name or uid[:gid] of at most 64 characters"));
    }
    Ok(())
}

/// A path in a guest: what no file system can hold is refused here; the rest is the guest's business.
pub fn path(field: &str, path: &str) -> Checked {
    if path.is_empty() {
        return Err(invalid(
            field,
            format!("{field} is empty; give an absolute path, or one relative to the user's home"),
        ));
    }
    if path.contains('\0') {
        return Err(invalid(field, format!("{field} has a NUL character, which no path can have")));
    }
    if path.len() > limits::PATH_MAX_BYTES {
        let max = limits::PATH_MAX_BYTES;
        return Err(invalid(field, format!("{field} has {} bytes; a path has at most {max}", path.len())));
    }
    if path.split('/').any(|part| part.len() > limits::PATH_COMPONENT_MAX_BYTES) {
        let max = limits::PATH_COMPONENT_MAX_BYTES;
        return Err(invalid(field, format!("a part of {field} is longer than {max} bytes")));
    }
    Ok(())
}

/// Octal permission bits.
pub fn mode(field: &str, text: &str) -> Checked<u32> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 && !text.starts_with('+') => Ok(mode),
        _ => Err(invalid(field, format!("{field} is octal permission bits such as 644 or 0755"))),
    }
}

pub fn ttl(seconds: u64) -> Checked {
    within("ttl_seconds", seconds, limits::TTL_MIN_SECONDS, limits::TTL_MAX_SECONDS, "seconds")
}

pub fn create_sandbox(body: &CreateSandbox) -> Checked<TemplateRef> {
    let template = template_ref("template", &body.template)?;
    if let Some(name) = &body.name {
        sandbox_name(name)?;
    }
    sizes("", body.memory_mib, body.vcpus)?;
    env("env", &body.env)?;
    if body.metadata.len() > limits::METADATA_KEYS_MAX {
        return Err(too_much_metadata());
    }
    for (key, value) in &body.metadata {
        metadata_pair(key, Some(value))?;
    }
    body.ttl_seconds.map_or(Ok(()), ttl)?;
    Ok(template)
}

fn sizes(prefix: &str, memory_mib: Option<u32>, vcpus: Option<u32>) -> Checked {
    let (min, max) = (u64::from(limits::MEMORY_MIN_MIB), u64::from(limits::MEMORY_MAX_MIB));
    if let Some(memory) = memory_mib {
        within(&format!("{prefix}memory_mib"), memory.into(), min, max, "MiB")?;
    }
    if let Some(vcpus) = vcpus {
        within(&format!("{prefix}vcpus"), vcpus.into(), 1, limits::VCPUS_MAX.into(), "CPUs")?;
    }
    Ok(())
}

pub fn terminal(size: TerminalSize) -> Checked {
    let good = |n: u16| (1..=TERMINAL_MAX).contains(&n);
    if good(size.cols) && good(size.rows) {
        return Ok(());
    }
    Err(invalid(
        "terminal",
        format!("a terminal has 1 to {TERMINAL_MAX} columns and rows, got {}x{}", size.cols, size.rows),
    ))
}

pub fn create_command(body: &CreateCommand) -> Checked {
    let Some(program) = body.argv.first() else {
        return Err(invalid("argv", "argv is empty; its first element is the program"));
    };
    if program.is_empty() {
        return Err(invalid("argv[0]", "the program's name is empty"));
    }
    if body.argv.len() > limits::ARGV_MAX {
        return Err(invalid("argv", format!("at most {} arguments, got {}", limits::ARGV_MAX, body.argv.len())));
    }
    if let Some(at) = body.argv.iter().position(|arg| arg.contains('\0')) {
        return Err(invalid(&format!("argv[{at}]"), "an argument has a NUL character; the kernel passes none"));
    }
    let total: usize = body.argv.iter().map(|arg| arg.len() + 1).sum();
    if total > limits::ARGV_TOTAL_MAX_BYTES {
        let max = limits::ARGV_TOTAL_MAX_BYTES;
        return Err(invalid(
            "argv",
            format!("the arguments have {total} bytes, at most {max} fit; pass the rest by stdin or a file"),
        ));
    }
    env("env", &body.env)?;
    user("user", body.user.as_deref())?;
    body.workdir.as_deref().map_or(Ok(()), |dir| path("workdir", dir))?;
    body.terminal.map_or(Ok(()), terminal)?;
    body.timeout_seconds.map_or(Ok(()), |s| within("timeout_seconds", s, 1, TIMEOUT_MAX_SECONDS, "seconds"))
}

/// The tag is a tag; sizes are possible. What the source means is the node's to say.
pub fn build_template(body: &BuildTemplate) -> Checked {
    tag(&body.tag)?;
    if body.source.is_empty() || body.source.len() > SOURCE_MAX_BYTES || body.source.contains('\0') {
        return Err(invalid(
            "source",
            "a source is seed, debian:SUITE+PACKAGE,…, dir:PATH, tar:PATH, oci:PATH, oci-archive:PATH or docker://HOST/REPOSITORY",
        ));
    }
    let known = ["seed:", "debian:", "dir:", "tar:", "oci:", "oci-archive:", "docker://"];
    if body.source != "seed" && !known.iter().any(|kind| body.source.starts_with(kind)) {
        let shown: String = body.source.chars().take(80).collect();
        return Err(invalid(
            "source",
            format!(
                "{shown:?} is no source: seed, debian:SUITE+PACKAGE,…, dir:PATH, tar:PATH, oci:PATH, oci-archive:PATH or docker://HOST/REPOSITORY"
            ),
        ));
    }
    let options = &body.options;
    sizes("options.", options.memory_mib, options.vcpus)?;
    if let Some(disk) = options.disk_bytes {
        within("options.disk_bytes", disk, limits::DISK_MIN_BYTES, limits::DISK_MAX_BYTES, "bytes")?;
    }
    env("options.env", &options.env)?;
    user("options.user", options.user.as_deref())?;
    options.workdir.as_deref().map_or(Ok(()), |dir| path("options.workdir", dir))?;
    for (field, text) in [("start_command", &options.start_command), ("ready_command", &options.ready_command)] {
        if text.as_ref().is_some_and(|t| t.len() > SHELL_MAX_BYTES || t.contains('\0')) {
            return Err(invalid(&format!("options.{field}"), "a command has at most 64 KiB and no NUL character"));
        }
    }
    let ready = options.ready_timeout_seconds;
    ready.map_or(Ok(()), |s| within("options.ready_timeout_seconds", s, 1, READY_MAX_SECONDS, "seconds"))
}

/// Whether a build reads the node's own files, or speaks to others without TLS.
pub fn needs_admin(body: &BuildTemplate) -> bool {
    ["dir:", "tar:", "oci:", "oci-archive:"].iter().any(|kind| body.source.starts_with(kind)) || body.insecure_registry
}

pub fn tag(text: &str) -> Checked<(String, String)> {
    match template_ref("tag", text)? {
        TemplateRef::Tag { name, tag } => Ok((name, tag)),
        TemplateRef::Digest(_) => Err(invalid("tag", "a tag is NAME or NAME:TAG, not a digest")),
    }
}

pub fn key_name(name: &str) -> Checked {
    if name.is_empty() || name.len() > KEY_NAME_MAX_BYTES || name.chars().any(char::is_control) {
        return Err(invalid(
            "name",
            format!("a key's name has 1 to {KEY_NAME_MAX_BYTES} bytes and no control characters"),
        ));
    }
    Ok(())
}

/// `TERM`, `SIGTERM` or a number, as the guest (Linux on x86-64 and arm64) counts them.
pub fn signal(text: &str) -> Checked<i32> {
    const NAMES: [(&str, i32); 31] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ILL", 4),
        ("TRAP", 5),
        ("ABRT", 6),
        ("BUS", 7),
        ("FPE", 8),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("STKFLT", 16),
        ("CHLD", 17),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("TTIN", 21),
        ("TTOU", 22),
        ("URG", 23),
        ("XCPU", 24),
        ("XFSZ", 25),
        ("VTALRM", 26),
        ("PROF", 27),
        ("WINCH", 28),
        ("IO", 29),
        ("PWR", 30),
        ("SYS", 31),
    ];
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let number = text.parse::<i32>().ok().filter(|n| (1..=64).contains(n));
    let named = NAMES.iter().find(|(known, _)| *known == name).map(|(_, n)| *n);
    number.or(named).ok_or_else(|| {
        let shown: String = text.chars().take(40).collect();
        invalid("signal", format!("{shown:?} is no signal; say TERM, SIGTERM or a number from 1 to 64"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_cannot_be_are_refused() {
        for bad in ["", "a\0b", &"a/".repeat(3000), &"b".repeat(256)] {
            assert!(path("path", bad).is_err(), "{bad:.40}");
        }
        for good in ["/", "a", "../../x", "/tmp/ä€", &"b".repeat(255)] {
            assert!(path("path", good).is_ok(), "{good}");
        }
    }

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(signal("TERM").ok(), Some(15));
        assert_eq!(signal("sigkill").ok(), Some(9));
        assert_eq!(signal("64").ok(), Some(64));
        for bad in ["", "0", "65", "-9", "TERMINATE", "SIG"] {
            assert!(signal(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("mode", "0755").ok(), Some(0o755));
        for bad in ["", "8", "0o7", "+7", "77777", "-1"] {
            assert!(mode("mode", bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics(text in ".{0,300}") {
            let _ = (signal(&text), mode("m", &text), path("p", &text), tag(&text), user("u", Some(&text)));
            let _ = (sandbox_name(&text), key_name(&text), metadata_pair(&text, Some(&text)));
        }
    }
}
