//! Pieces of a grammar: a text, so many of something.
//!
//! Never looks into a schema but for two numbers.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use crate::server::{error::ApiError, fields::whole};

/// Repetitions llama.cpp's grammars take.
const MAX_COUNT: u64 = 1000;

/// How many of something a schema wants, at least and at most, by the names of the two.
pub(super) fn bounds(map: &Map<String, Value>, names: [&str; 2], path: &str) -> Result<(u64, Option<u64>), ApiError> {
    let read = |name: &str| {
        let path = format!("{path}.{name}");
        map.get(name).map(|value| whole(value, &path, 0..=MAX_COUNT)).transpose()
    };
    let (least, most) = (read(names[0])?.unwrap_or(0), read(names[1])?);
    if most.is_some_and(|most| most < least) {
        let path = format!("{path}.{}", names[1]);
        return Err(ApiError::invalid(&path, format!("{path} is below {}", names[0])));
    }
    Ok((least, most))
}

/// So many of `what`.
pub(super) fn repeat(what: &str, least: u64, most: Option<u64>) -> String {
    match (least, most) {
        (0, None) => format!("{what}*"),
        (least, None) => format!("{what}{{{least},}}"),
        (_, Some(0)) => String::new(),
        (least, Some(most)) => format!("{what}{{{least},{most}}}"),
    }
}

/// A text as a grammar writes it.
pub(super) fn literal(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            c if c.is_control() => {
                // Writing to a string does not fail.
                let _ = write!(quoted, "\\x{:02X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
