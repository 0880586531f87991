//! One file per command. Each has its arguments, its help with examples, and `execute`, which answers the exit status.

pub mod completions;
pub mod config;
pub mod cp;
pub mod create;
pub mod delete;
pub mod doctor;
pub mod down;
pub mod exec;
pub mod inspect;
pub mod key;
pub mod logs;
pub mod ls;
pub mod ps;
pub mod run;
pub mod setup;
pub mod shell;
pub mod template;
pub mod up;
