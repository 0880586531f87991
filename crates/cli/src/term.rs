//! The caller's terminal: its size, and raw mode that is undone whatever happens.

use rustix::termios::{OptionalActions, Termios};
use space_api::TerminalSize;

/// Raw mode until it is dropped, also while a panic unwinds.
pub struct Raw {
    before: Termios,
}

impl Raw {
    /// `None` when standard input is no terminal.
    pub fn enter() -> Option<Self> {
        let before = rustix::termios::tcgetattr(std::io::stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Flush, &raw).ok()?;
        Some(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Of standard output or input; 80×24 when neither is a terminal.
pub fn size() -> TerminalSize {
    let of_out = rustix::termios::tcgetwinsize(std::io::stdout());
    let found = of_out.or_else(|_| rustix::termios::tcgetwinsize(std::io::stdin()));
    match found {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => TerminalSize { cols: size.ws_col, rows: size.ws_row },
        _ => TerminalSize { cols: 80, rows: 24 },
    }
}
