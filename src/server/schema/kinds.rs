//! What a schema of each type allows.
//!
//! Never looks at what is said of all types alike, such as a choice or a reference.

use serde_json::{Map, Value};

use super::span;
use super::{
    Writer, number,
    parts::{bounds, literal, repeat, texts},
};
use crate::server::{error::ApiError, fields::wrong_kind};

impl Writer<'_> {
    pub(super) fn kind(
        &mut self,
        kind: &str,
        map: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<String, ApiError> {
        let begins = self.begins.take();
        let rule = self.behind_bracket(kind, map, path, depth);
        self.begins = begins;
        rule
    }

    /// What can hold other schemas writes a bracket in front of them.
    fn behind_bracket(
        &mut self,
        kind: &str,
        map: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<String, ApiError> {
        match kind {
            "object" => self.object(map, path, depth),
            "array" => {
                let items = match map.get("items") {
                    Some(items) => self.schema(items, &format!("{path}.items"), depth + 1)?,
                    None => "value".to_owned(),
                };
                let (least, most) = bounds(map, ["minItems", "maxItems"], path)?;
                let rest = |least: u64, most: Option<u64>| repeat(&format!("(ws \",\" ws {items})"), least, most);
                let body = match (least, most) {
                    (_, Some(0)) => String::new(),
                    (0, most) => format!("({items} {})?", rest(0, most.map(|most| most - 1))),
                    (least, most) => format!("{items} {}", rest(least - 1, most.map(|most| most - 1))),
                };
                self.rule(&format!("\"[\" ws {body} ws \"]\""))
            }
            "string" => match bounds(map, ["minLength", "maxLength"], path)? {
                (0, None) => Ok("string".to_owned()),
                (least, most) => self.rule(&format!("\"\\\"\" {} \"\\\"\"", repeat("char", least, most))),
            },
            "integer" => match span::of_schema(map, path)? {
                Some((low, high)) => self.rule(&span::span(low, high)),
                None => Ok(kind.to_owned()),
            },
            "number" => match number::of_schema(map, path)? {
                Some(rule) => self.rule(&rule),
                None => Ok(kind.to_owned()),
            },
            "boolean" | "null" => Ok(kind.to_owned()),
            _ => {
                let path = format!("{path}.type");
                Err(ApiError::invalid(&path, format!("{path} is {kind:?}, which is not a type of JSON schema")))
            }
        }
    }

    fn object(&mut self, map: &Map<String, Value>, path: &str, depth: usize) -> Result<String, ApiError> {
        let none = Map::new();
        let properties = match map.get("properties") {
            None => &none,
            Some(Value::Object(properties)) => properties,
            Some(other) => return Err(wrong_kind(&format!("{path}.properties"), "an object", other)),
        };
        let required = texts(map, "required", path)?;
        if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
            let path = format!("{path}.required");
            return Err(ApiError::invalid(&path, format!("{path} names {name:?}, which is not among the properties")));
        }
        if let Some(more) = map.get("additionalProperties").filter(|more| !more.is_boolean() && !more.is_object()) {
            return Err(wrong_kind(&format!("{path}.additionalProperties"), "a schema, true or false", more));
        }
        if properties.is_empty() {
            return match map.get("additionalProperties") {
                Some(Value::Bool(false)) => Ok("\"{\" ws \"}\"".to_owned()),
                None | Some(Value::Bool(true)) => Ok("object".to_owned()),
                Some(schema) => {
                    let value = self.schema(schema, &format!("{path}.additionalProperties"), depth + 1)?;
                    let pair = self.rule(&format!("string ws \":\" ws {value}"))?;
                    self.rule(&format!("\"{{\" ws ({pair} (ws \",\" ws {pair})*)? ws \"}}\""))
                }
            };
        }
        let mut pairs = Vec::with_capacity(properties.len());
        for (name, schema) in properties {
            let value = self.schema(schema, &format!("{path}.properties.{name}"), depth + 1)?;
            let key = literal(&Value::from(name.as_str()).to_string());
            pairs.push((self.rule(&format!("{key} ws \":\" ws {value}"))?, required.contains(&name.as_str())));
        }
        // What may follow pair i, from the last to the first.
        let mut tails = vec![String::new(); pairs.len()];
        for at in (0..pairs.len() - 1).rev() {
            let (pair, is_required) = &pairs[at + 1];
            let mark = if *is_required { "" } else { "?" };
            let body = format!("(ws \",\" ws {pair}){mark} {}", tails[at + 1]);
            tails[at] = self.rule(&body)?;
        }
        // The first pair is any of those up to the first that must be there.
        let first_required = pairs.iter().position(|(_, is_required)| *is_required);
        let n_starts = first_required.map_or(pairs.len(), |at| at + 1);
        let starts: Vec<String> = (0..n_starts).map(|at| format!("{} {}", pairs[at].0, tails[at])).collect();
        let mark = if first_required.is_some() { "" } else { "?" };
        self.rule(&format!("\"{{\" ws ({}){mark} ws \"}}\"", starts.join(" | ")))
    }
}
