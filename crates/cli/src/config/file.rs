//! `space.toml`. A key that is not known is refused with its line, so that a typing error never passes as a default.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::env;
use crate::failure::Failure;

const PLACES: [&str; 2] = ["space.toml", "/etc/space/space.toml"];
const FILE_MAX_BYTES: u64 = 1024 * 1024;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct File {
    data_dir: Option<String>,
    listen: Option<String>,
    data_listen: Option<String>,
    log: Option<String>,
    log_format: Option<String>,
    pool: Pool,
    vmm: Vmm,
    warm: Warm,
    limits: Limits,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Pool {
    size: Option<String>,
    device: Option<String>,
    path: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Vmm {
    driver: Option<String>,
    program: Option<String>,
    kernel: Option<String>,
    kernel_args: Option<String>,
    core_scheduling: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Warm {
    per_template: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Limits {
    memory: Option<String>,
    sandboxes: Option<u32>,
}

/// The file to use: the one named by flag or variable, which must be there, or the first of the usual places.
pub(super) fn find(named: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    let named = named.map(Path::to_owned).or_else(|| env::get(env::CONFIG).map(PathBuf::from));
    if let Some(path) = named {
        return if path.is_file() {
            Ok(Some(path))
        } else {
            Err(Failure::usage(format!("there is no configuration file {}", path.display())))
        };
    }
    Ok(PLACES.iter().map(PathBuf::from).find(|path| path.is_file()))
}

/// Its settings, by their names in `KEYS`.
pub(super) fn read(path: &Path) -> Result<Vec<(&'static str, String)>, Failure> {
    let fail = |why: String| Failure::usage(format!("{}: {why}", path.display()));
    let size = std::fs::metadata(path).map_err(|e| fail(e.to_string()))?.len();
    if size > FILE_MAX_BYTES {
        return Err(fail("larger than 1 MiB; that is not a configuration file".into()));
    }
    parse(&std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?).map_err(fail)
}

fn parse(text: &str) -> Result<Vec<(&'static str, String)>, String> {
    let file: File = toml::from_str(text).map_err(|e| e.to_string().trim_end().replace('\n', " "))?;
    let all = [
        ("data_dir", file.data_dir),
        ("listen", file.listen),
        ("data_listen", file.data_listen),
        ("log", file.log),
        ("log_format", file.log_format),
        ("pool.size", file.pool.size),
        ("pool.device", file.pool.device),
        ("pool.path", file.pool.path),
        ("vmm.driver", file.vmm.driver),
        ("vmm.program", file.vmm.program),
        ("vmm.kernel", file.vmm.kernel),
        ("vmm.kernel_args", file.vmm.kernel_args),
        ("vmm.core_scheduling", file.vmm.core_scheduling),
        ("warm.per_template", file.warm.per_template),
        ("limits.memory", file.limits.memory),
        ("limits.sandboxes", file.limits.sandboxes.map(|n| n.to_string())),
    ];
    Ok(all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<(&'static str, String)>, Failure> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        read(file.path())
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_known_settings_or_an_error(lines in proptest::collection::vec(
            r#"(\[?(pool|vmm|warm|limits|x)\]?|(listen|log|size|memory|sandboxes|driver|[a-z.]{1,8}) ?= ?("[^\n]{0,8}"?|[0-9-]{1,12}|\[|\{|true))"#, 0..6,
        )) {
            if let Ok(settings) = parse(&lines.join("\n")) {
                for (name, _) in settings {
                    proptest::prop_assert!(super::super::KEYS.iter().any(|key| key.name == name), "{name}");
                }
            }
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let text = read_text("listen = \"127.0.0.1:1\"\nlissten = 2\n").expect_err("unknown key").to_string();
        assert!(text.contains("line 2") && text.contains("lissten"), "{text}");
        let text = read_text("[pool]\nsiez = \"1G\"\n").expect_err("unknown key").to_string();
        assert!(text.contains("siez"), "{text}");
    }

    #[test]
    fn every_key_can_stand_in_the_file() {
        for key in super::super::KEYS {
            let value = if key.name == "limits.sandboxes" { "7" } else { "\"7\"" };
            let text = match key.name.split_once('.') {
                Some((table, name)) => format!("[{table}]\n{name} = {value}\n"),
                None => format!("{} = {value}\n", key.name),
            };
            assert_eq!(read_text(&text).expect(key.name), [(key.name, "7".to_owned())]);
        }
    }
}
