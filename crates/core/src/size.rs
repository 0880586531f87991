//! Sizes as people write them: `512`, `512MiB`, `2G`, `1.5GiB`. All units are powers of 1024.

/// Bytes, or what is wrong with the text.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a size; write a number with B, KiB, MiB, GiB or TiB, as 64GiB");
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(bad()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or_else(bad);
    }
    let value: f64 = number.parse().map_err(|_| bad())?;
    let bytes = value * (1u64 << shift) as f64;
    // Beyond 2^53 a fraction has no meaning.
    if bytes.is_finite() && (0.0..9e15).contains(&bytes) { Ok(bytes as u64) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        for (text, bytes) in [("0", 0), ("512", 512), ("2K", 2048), ("1.5GiB", 3 << 29), ("64 GiB", 64 << 30)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "x", "-1", "1Q", "1..5G", "99999999999T", "1e99"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
