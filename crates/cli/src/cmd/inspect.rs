//! `space inspect`

use clap::Args;

use crate::args::Global;
use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Paint, clean, paint};

const AFTER_HELP: &str = "\
Examples:
  space inspect box
  space inspect box --json | jq .state";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Inspect {
    /// Names or ids
    #[arg(required = true, value_name = "SANDBOX")]
    sandboxes: Vec<String>,
}

/// `name  value` lines of a JSON object; what is empty is left out.
pub fn print_fields(value: &serde_json::Value) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let text = match value {
            serde_json::Value::Null => continue,
            serde_json::Value::Object(map) if map.is_empty() => continue,
            serde_json::Value::Array(list) if list.is_empty() => continue,
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Number(number) if name.ends_with("_ms") => date(number.as_i64().unwrap_or(0)),
            serde_json::Value::Number(number) if name.contains("bytes") => output::size(number.as_u64().unwrap_or(0)),
            other => other.to_string(),
        };
        let name = name.strip_suffix("_at_ms").unwrap_or(name).trim_end_matches("_bytes");
        output::line(format!("{} {}", paint(&format!("{name:<16}"), Paint::Dim), clean(&text)));
    }
}

fn date(ms: i64) -> String {
    let format = &time::format_description::well_known::Rfc3339;
    let at = time::OffsetDateTime::from_unix_timestamp(ms / 1000).ok().and_then(|at| at.format(format).ok());
    at.unwrap_or_else(|| ms.to_string())
}

impl Inspect {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let mut found = Vec::new();
        for name in &self.sandboxes {
            found.push(client.sandbox(name).await?);
        }
        if global.json {
            match found.as_slice() {
                [one] => output::json(one),
                all => output::json(&all),
            }
            return Ok(0);
        }
        for (at, sandbox) in found.iter().enumerate() {
            if at > 0 {
                output::line("");
            }
            print_fields(&serde_json::to_value(sandbox).expect("a sandbox is plain data"));
        }
        Ok(0)
    }
}
