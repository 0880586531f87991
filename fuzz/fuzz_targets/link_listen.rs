//! See `space_hostile::TARGETS`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| space_hostile::check("link_listen", data));
