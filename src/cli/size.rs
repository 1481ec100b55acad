//! Sizes as people write and read them: `1GiB`, `512M`, `23.0 MB`.
//!
//! Never rounds what is read.

use eldr::types::shown;

const UNITS: [(&str, u64); 8] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

/// Bytes of a size such as `1.5GiB`, `800MB`, `1G` (which is 1GiB) or `4096`.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{}' is not a size; write 1GiB, 800MB or a number of bytes", shown(text));
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let factor = match unit.as_str() {
        "" | "b" => 1,
        "k" | "m" | "g" | "t" => UNITS.iter().find(|(name, _)| name.starts_with(&unit)).ok_or_else(wrong)?.1,
        _ => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?.1,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * factor as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(wrong()) }
}

/// Bytes in the largest binary unit that keeps a whole digit.
pub fn show(bytes: u64) -> String {
    match UNITS[..4].iter().rev().find(|(_, factor)| bytes >= *factor) {
        Some((_, factor)) => {
            let unit = match factor {
                0x400 => "KiB",
                0x10_0000 => "MiB",
                0x4000_0000 => "GiB",
                _ => "TiB",
            };
            format!("{:.1} {unit}", bytes as f64 / *factor as f64)
        }
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in
            [("4096", 4096), ("1GiB", 1 << 30), ("1G", 1 << 30), ("1.5k", 1536), ("800MB", 800_000_000), ("2 kb", 2000)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "1.2.3G", "5 parsecs", "-1", "99999999999T", "1e9"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        for (bytes, text) in [(7, "7 B"), (1536, "1.5 KiB"), (22_969_056, "21.9 MiB"), (1 << 31, "2.0 GiB")] {
            assert_eq!(show(bytes), text);
        }
    }
}
