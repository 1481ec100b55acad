use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of one JSON object of a request's body, which know their path. `null` is as good as absent.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The fields of `value`, found at `path` (empty for the body itself).
    pub fn of(value: &'a Value, path: &str) -> Result<Self, ApiError> {
        let wrong = || match path {
            "" => ApiError::invalid("", format!("the body must be a JSON object, not {}", kind(value))),
            _ => wrong_kind(path, "an object", value),
        };
        Ok(Self { map: value.as_object().ok_or_else(wrong)?, path: path.to_owned() })
    }

    /// The path of the field `name`.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// Refuses what is none of `names`.
    pub fn only(&self, names: &[&str]) -> Result<(), ApiError> {
        let Some(name) = self.map.keys().find(|name| !names.contains(&name.as_str())) else { return Ok(()) };
        let path = self.path(name);
        let known = names.join(", ");
        Err(ApiError::invalid(&path, format!("{path} is not a field of {}; its fields are {known}", self.path)))
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A field that must be there.
    pub fn required(&self, name: &str) -> Result<&'a Value, ApiError> {
        self.get(name).ok_or_else(|| {
            let path = self.path(name);
            ApiError::invalid(&path, format!("{path} is missing"))
        })
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.get(name).map(|value| Self::of(value, &self.path(name))).transpose()
    }

    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.read(name, "a number", Value::as_f64)? else { return Ok(None) };
        if range.contains(&value) {
            return Ok(Some(value as f32));
        }
        let path = self.path(name);
        let (low, high) = range.into_inner();
        Err(ApiError::invalid(&path, format!("{path} is {value}; it must be between {low} and {high}")))
    }

    pub fn whole(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let path = self.path(name);
        whole(value, &path, range).map(Some)
    }

    /// As [`Fields::whole`], and -1, which llama-server's clients send for what is not limited, is `open`.
    pub fn whole_or(&self, name: &str, range: RangeInclusive<u64>, open: u64) -> Result<Option<u64>, ApiError> {
        if self.get(name).and_then(Value::as_f64) == Some(-1.0) {
            return Ok(Some(open));
        }
        self.whole(name, range).map_err(|mut error| {
            error.message.push_str(", or -1");
            error
        })
    }

    fn read<T>(&self, name: &str, want: &str, get: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        get(value).map(Some).ok_or_else(|| wrong_kind(&self.path(name), want, value))
    }
}

/// A whole number of a range, found at `path`; `3.0` is one.
pub(super) fn whole(value: &Value, path: &str, range: RangeInclusive<u64>) -> Result<u64, ApiError> {
    let as_float = || value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x)).map(|x| x as u64);
    if let Some(number) = value.as_u64().or_else(as_float).filter(|number| range.contains(number)) {
        return Ok(number);
    }
    let (low, high) = range.into_inner();
    let shown = if value.is_number() { value.to_string() } else { kind(value).to_owned() };
    Err(ApiError::invalid(path, format!("{path} is {shown}; it must be a whole number from {low} to {high}")))
}

/// What to say of a value of the wrong kind.
pub(super) fn wrong_kind(path: &str, want: &str, value: &Value) -> ApiError {
    ApiError::invalid(path, format!("{path} must be {want}, not {}", kind(value)))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_wrong_field_is_named_with_its_path() {
        let body = json!({"a": {"b": "x", "n": 3.0, "big": 99, "frac": 1.5, "nothing": null, "list": [1]}});
        let a = Fields::of(&body, "").expect("an object").object("a").expect("an object").expect("there");
        assert_eq!(a.text("b"), Ok(Some("x")));
        assert_eq!(a.text("nothing"), Ok(None));
        assert_eq!(a.whole("n", 0..=9), Ok(Some(3)));
        let open = json!({"n": -1, "m": -1.0, "k": -2});
        let open = Fields::of(&open, "").expect("an object");
        assert_eq!((open.whole_or("n", 1..=9, 7), open.whole_or("m", 1..=9, 7)), (Ok(Some(7)), Ok(Some(7))));
        let error = open.whole_or("k", 1..=9, 7).expect_err("below -1");
        assert_eq!(error.message, "k is -2; it must be a whole number from 1 to 9, or -1");
        for (error, want) in [
            (a.flag("b").err(), "a.b must be true or false, not a string"),
            (a.whole("big", 0..=9).err(), "a.big is 99; it must be a whole number from 0 to 9"),
            (a.whole("frac", 0..=9).err(), "a.frac is 1.5; it must be a whole number from 0 to 9"),
            (a.number("big", 0.0..=2.0).err(), "a.big is 99; it must be between 0 and 2"),
            (a.required("gone").err(), "a.gone is missing"),
            (a.object("list").err(), "a.list must be an object, not a list"),
        ] {
            let error = error.expect(want);
            assert_eq!(error.message, want);
            assert!(error.param.is_some_and(|param| want.starts_with(&param)), "{want}");
        }
        assert_eq!(Fields::of(&json!([]), "").expect_err("a list").param, None);
    }
}
