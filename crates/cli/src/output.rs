//! What is printed: tables, colours (only on a terminal), sizes and ages, JSON. Writing to a closed pipe is not an error
//! to report but the end of the program, as for any filter.

use std::io::{IsTerminal as _, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::env;

/// Shell convention for "ended by SIGPIPE".
pub const BROKEN_PIPE_STATUS: i32 = 141;

#[derive(Clone, Copy, Debug)]
pub enum Paint {
    Red,
    Green,
    Yellow,
    Bold,
    Dim,
}

fn colours(terminal: bool) -> bool {
    terminal && env::get(env::NO_COLOR).is_none() && env::get(env::TERM).is_none_or(|term| term != "dumb")
}

fn painted(text: &str, paint: Paint, on: bool) -> String {
    if !on {
        return text.to_owned();
    }
    let code = match paint {
        Paint::Red => "31",
        Paint::Green => "32",
        Paint::Yellow => "33",
        Paint::Bold => "1",
        Paint::Dim => "2",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// For standard output.
pub fn paint(text: &str, with: Paint) -> String {
    painted(text, with, colours(std::io::stdout().is_terminal()))
}

/// For standard error.
pub fn paint_err(text: &str, with: Paint) -> String {
    painted(text, with, colours(std::io::stderr().is_terminal()))
}

/// A line on standard output.
pub fn line(text: impl AsRef<str>) {
    let mut out = std::io::stdout().lock();
    let written =
        out.write_all(text.as_ref().as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush());
    if written.is_err() {
        std::process::exit(BROKEN_PIPE_STATUS);
    }
}

/// A line on standard error, for people; a closed one is ignored.
pub fn note(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
}

/// One JSON document on standard output.
pub fn json(value: &impl Serialize) {
    line(serde_json::to_string_pretty(value).expect("answers are plain data"));
}

/// One JSON document in one line.
pub fn json_line(value: &impl Serialize) {
    line(serde_json::to_string(value).expect("answers are plain data"));
}

/// Text that came from elsewhere, without control characters: a name must not be able to rewrite the screen.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Rows under a head, each column as wide as its longest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|&s| s.to_owned()).collect()] }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| clean(cell)).collect());
    }

    pub fn print(&self) {
        for (at, row) in self.render().into_iter().enumerate() {
            line(if at == 0 { paint(&row, Paint::Dim) } else { row });
        }
    }

    fn render(&self) -> Vec<String> {
        let columns = self.rows[0].len();
        let width = |at: usize| self.rows.iter().filter_map(|row| row.get(at)).map(|c| c.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
        let join = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(join).collect()
    }
}

/// `1.5 GiB`
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 || value.fract() < 0.05 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Milliseconds since 1970.
pub fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// `3m` for a time three minutes ago or ahead.
pub fn age(at_ms: i64) -> String {
    let seconds = now_ms().saturating_sub(at_ms).unsigned_abs() / 1000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2 << 30, "2 GiB")] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn tables_line_up_and_are_clean() {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.row(vec!["a\x1b[31m".into(), "running".into()]);
        assert_eq!(table.render(), ["NAME    STATE", "a\u{fffd}[31m  running"]);
    }
}
