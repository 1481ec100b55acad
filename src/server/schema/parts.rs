//! Pieces of a grammar: a text, so many of something.
//!
//! Never looks into a schema but for two numbers or a list of names.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use crate::server::{
    error::ApiError,
    fields::{whole, wrong_kind},
};

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

/// The texts that `name` of a schema lists, or the one it is; none where it is not there.
pub(super) fn texts<'a>(map: &'a Map<String, Value>, name: &str, path: &str) -> Result<Vec<&'a str>, ApiError> {
    let path = format!("{path}.{name}");
    match map.get(name) {
        None => Ok(Vec::new()),
        Some(Value::String(text)) if name == "type" => Ok(vec![text]),
        Some(Value::Array(list)) => {
            let text = |(at, value): (usize, &'a Value)| {
                value.as_str().ok_or_else(|| wrong_kind(&format!("{path}[{at}]"), "a string", value))
            };
            list.iter().enumerate().map(text).collect()
        }
        Some(other) => Err(wrong_kind(&path, if name == "type" { "a string" } else { "a list of strings" }, other)),
    }
}

/// Whether `value` is of the type that a schema names `kind`.
pub(super) fn is_of(value: &Value, kind: &str) -> bool {
    match value {
        Value::Null => kind == "null",
        Value::Bool(_) => kind == "boolean",
        Value::Number(number) => {
            kind == "number" || (kind == "integer" && number.as_f64().is_some_and(|number| number.fract() == 0.0))
        }
        Value::String(_) => kind == "string",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
    }
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
