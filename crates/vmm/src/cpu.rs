//! What a processor is, for states that only the same one may continue.
//!
//! A guest that was restored goes on using the instructions it found at its boot. A host that lacks one of them, or has
//! other microcode, would give it an illegal instruction or worse; so all of it is part of what is compared.

use sha2::{Digest, Sha256};

const CPUINFO: &str = "/proc/cpuinfo";

/// Words of the form `key=value`, the same for the same processor, features and microcode.
///
/// # Errors
/// When the kernel's description cannot be read.
pub fn fingerprint() -> std::io::Result<String> {
    Ok(describe(&std::fs::read_to_string(CPUINFO)?))
}

fn describe(cpuinfo: &str) -> String {
    let first: Vec<(&str, &str)> = cpuinfo
        .lines()
        .take_while(|line| !line.trim().is_empty())
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.trim(), value.trim()))
        .collect();
    let get = |key: &str| first.iter().find(|(name, _)| *name == key).map_or("unknown", |(_, value)| value);
    let mut flags: Vec<&str> = get("flags").split_whitespace().collect();
    flags.sort_unstable();
    let digest = Sha256::digest(flags.join(" "));
    let flags: String = digest[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    let model = ["vendor_id", "cpu family", "model", "stepping"].map(get).join("-").replace(' ', "_");
    format!("cpu={model} microcode={} flags={flags}", get("microcode"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_flag_or_microcode_is_another_processor() {
        let of = |flags: &str, microcode: &str| {
            describe(&format!(
                "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nstepping\t: 8\n\
                 microcode\t: {microcode}\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: other\n"
            ))
        };
        let own = of("fpu sse avx", "0x2b");
        assert!(own.starts_with("cpu=GenuineIntel-6-143-8 microcode=0x2b flags="), "{own}");
        assert_eq!(own, of("avx fpu sse", "0x2b"));
        assert_ne!(own, of("fpu sse", "0x2b"));
        assert_ne!(own, of("fpu sse avx", "0x2c"));
    }
}
