//! Link
