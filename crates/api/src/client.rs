//! The Rust client of the API.
