mod apart;
mod kinds;
#[cfg(test)]
mod matcher;
mod number;
mod parts;
mod span;

use std::collections::BTreeMap;

use serde_json::Value;

use self::parts::{is_of, literal, texts};
use super::{error::ApiError, fields::wrong_kind};

/// Schemas inside schemas at most, and bytes of the grammar they make.
const MAX_DEPTH: usize = 48;
const MAX_BYTES: usize = 60 << 10;

/// What says nothing about which texts are valid.
const ANNOTATIONS: [&str; 14] = [
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "format",
    "strict",
];

/// JSON's own rules. White space is short, so that no model loses itself in it; numbers are those a double holds.
const JSON: &str = r#"ws ::= (" " | "\n" [ \t]{0,20})?
hex ::= [0-9a-fA-F]
char ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" ([0-9a-cefA-CEF] hex{3} | [dD] [0-7] hex{2}))
string ::= "\"" char* "\""
integer ::= "-"? ("0" | [1-9] [0-9]{0,15})
number ::= integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
value ::= object | array | string | number | boolean | null
object ::= "{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}"
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
"#;

/// The grammar of any JSON object.
pub(super) fn json_object() -> String {
    format!("root ::= object\n{JSON}")
}

/// The grammar of the JSON texts that `schema`, found at `path`, allows; properties come in the schema's order.
///
/// It knows `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `minItems`, `maxItems`,
/// `minLength`, `maxLength`, bounds of integers and numbers (which are then written without an exponent), `anyOf`, `oneOf`
/// of schemas that no value can be two of, `allOf` of one, and `$ref` into the schema. Anything else that could make a text
/// invalid is refused, by its path.
pub(super) fn json_schema(schema: &Value, path: &str) -> Result<String, ApiError> {
    let mut writer = Writer::new(schema, path);
    let root = writer.schema(schema, path, 0)?;
    writer.grammar(&root)
}

/// The grammar of a call of one of `functions` (name, schema of its parameters, the schema's path), with `open` in
/// front of it, `close` behind, and the arguments under the name `arguments`.
pub(super) fn call(
    functions: &[(&str, &Value, String)],
    [open, arguments, close]: [&str; 3],
) -> Result<String, ApiError> {
    let mut rules = Vec::new();
    let mut calls = Vec::new();
    for (number, (name, schema, path)) in functions.iter().enumerate() {
        let mut writer = Writer::new(schema, path);
        writer.prefix = format!("f{number}-");
        let parameters = writer.schema(schema, path, 0)?;
        let start = literal(&format!("{{\"name\": {}, \"{arguments}\": ", Value::from(*name)));
        calls.push(format!("{start} {parameters} \"}}\""));
        rules.extend(writer.rules);
    }
    let mut all = Writer::new(&Value::Null, "tools");
    all.rules = rules;
    all.grammar(&format!("{} ({}) {}", literal(open), calls.join(" | "), literal(close)))
}

/// Writes rules for one document.
struct Writer<'a> {
    document: &'a Value,
    path: String,
    prefix: String,
    rules: Vec<String>,
    n_bytes: usize,
    /// The rule of each `$ref`, from the moment it is begun: a schema may refer to itself.
    refs: BTreeMap<String, String>,
    /// The pointer whose text the schema being written may begin; none behind a bracket.
    begins: Option<String>,
    /// Pointers, and those that their texts may begin with.
    leads: Vec<(String, String)>,
}

impl<'a> Writer<'a> {
    fn new(document: &'a Value, path: &str) -> Self {
        Self {
            document,
            path: path.to_owned(),
            prefix: String::new(),
            rules: Vec::new(),
            n_bytes: 0,
            refs: BTreeMap::new(),
            begins: Some(String::new()),
            leads: Vec::new(),
        }
    }

    fn grammar(self, root: &str) -> Result<String, ApiError> {
        let mut text = format!("root ::= {root}\n");
        for rule in &self.rules {
            text.push_str(rule);
            text.push('\n');
        }
        text.push_str(JSON);
        if text.len() > MAX_BYTES + JSON.len() {
            return Err(self.too_large());
        }
        Ok(text)
    }

    fn too_large(&self) -> ApiError {
        let path = &self.path;
        ApiError::invalid(path, format!("{path} makes a grammar of more than {MAX_BYTES} bytes; ask for less"))
    }

    /// Adds a rule; gives its name.
    fn rule(&mut self, body: &str) -> Result<String, ApiError> {
        let name = format!("{}r{}", self.prefix, self.rules.len());
        self.define(self.rules.len(), &name, body)?;
        Ok(name)
    }

    fn define(&mut self, at: usize, name: &str, body: &str) -> Result<(), ApiError> {
        let rule = format!("{name} ::= {body}");
        self.n_bytes += rule.len();
        if self.n_bytes > MAX_BYTES {
            return Err(self.too_large());
        }
        if at == self.rules.len() {
            self.rules.push(rule);
        } else {
            self.rules[at] = rule;
        }
        Ok(())
    }

    /// What stands for the texts of `schema` in a rule.
    fn schema(&mut self, schema: &Value, path: &str, depth: usize) -> Result<String, ApiError> {
        if depth > MAX_DEPTH {
            return Err(ApiError::invalid(path, format!("{path} is nested more than {MAX_DEPTH} deep")));
        }
        let map = match schema {
            Value::Bool(true) => return Ok("value".to_owned()),
            Value::Object(map) => map,
            other => return Err(wrong_kind(path, "a schema (an object)", other)),
        };
        let said: Vec<&str> = map.keys().map(String::as_str).filter(|key| !ANNOTATIONS.contains(key)).collect();
        let only = |allowed: &[&str]| match said.iter().find(|key| !allowed.contains(key)) {
            Some(key) => {
                let path = format!("{path}.{key}");
                Err(ApiError::invalid(&path, format!("{path} is not something this server can hold a model to")))
            }
            None => Ok(()),
        };
        if let Some(target) = map.get("$ref") {
            only(&["$ref"])?;
            return self.reference(target, &format!("{path}.$ref"), depth);
        }
        for key in ["const", "enum"] {
            let Some(value) = map.get(key) else { continue };
            only(&[key, "type"])?;
            return self.values(key, value, &texts(map, "type", path)?, path);
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            if let Some(choices) = map.get(key) {
                only(&[key])?;
                return self.choices(choices, key, &format!("{path}.{key}"), depth);
            }
        }
        let kinds: Vec<&str> = match map.get("type") {
            Some(_) => texts(map, "type", path)?,
            None if map.contains_key("properties") => vec!["object"],
            None if map.contains_key("items") => vec!["array"],
            None => {
                only(&[])?;
                return Ok("value".to_owned());
            }
        };
        only(&[
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "type",
            "properties",
            "required",
            "additionalProperties",
            "items",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
        ])?;
        let parts: Vec<String> =
            kinds.iter().map(|kind| self.kind(kind, map, path, depth)).collect::<Result<_, _>>()?;
        match parts.len() {
            0 => Err(ApiError::invalid(&format!("{path}.type"), format!("{path}.type names no type"))),
            1 => Ok(parts[0].clone()),
            _ => self.rule(&parts.join(" | ")),
        }
    }

    /// The values that `key` lists, of which those of another type than the schema's are no answers.
    fn values(&mut self, key: &str, value: &Value, kinds: &[&str], path: &str) -> Result<String, ApiError> {
        let path = format!("{path}.{key}");
        let values = match value {
            Value::Array(values) if key == "enum" => values.as_slice(),
            _ if key == "enum" => return Err(wrong_kind(&path, "a list of values", value)),
            one => std::slice::from_ref(one),
        };
        let values = values.iter().filter(|value| kinds.is_empty() || kinds.iter().any(|kind| is_of(value, kind)));
        let values: Vec<String> = values.map(|value| literal(&value.to_string())).collect();
        match values.len() {
            0 => Err(ApiError::invalid(&path, format!("{path} has no value of the schema's type"))),
            1 if key == "const" => Ok(values[0].clone()),
            _ => self.rule(&values.join(" | ")),
        }
    }

    fn choices(&mut self, choices: &Value, key: &str, path: &str, depth: usize) -> Result<String, ApiError> {
        let choices = choices.as_array().filter(|choices| !choices.is_empty());
        let choices = choices.ok_or_else(|| ApiError::invalid(path, format!("{path} must be a list of schemas")))?;
        if key == "allOf" && choices.len() > 1 {
            return Err(ApiError::invalid(path, format!("{path} has several schemas, which this server can not join")));
        }
        let mut parts = Vec::with_capacity(choices.len());
        for (at, choice) in choices.iter().enumerate() {
            parts.push(self.schema(choice, &format!("{path}[{at}]"), depth + 1)?);
        }
        if key == "oneOf" && choices.len() > apart::MAX_CHOICES {
            let (n, most) = (choices.len(), apart::MAX_CHOICES);
            let why = format!("{path} has {n} schemas, of which at most {most} are compared: use anyOf, or one enum");
            return Err(ApiError::invalid(path, why));
        }
        if key == "oneOf"
            && let Some((a, b)) = apart::alike(self.document, choices)
        {
            let why = "a type, a constant or a required property does not tell them apart; use anyOf";
            return Err(ApiError::invalid(
                path,
                format!("{path} has schemas {a} and {b}, which one value may be both of: {why}"),
            ));
        }
        self.rule(&parts.join(" | "))
    }

    fn reference(&mut self, target: &Value, path: &str, depth: usize) -> Result<String, ApiError> {
        let pointer = target.as_str().and_then(|target| target.strip_prefix('#'));
        let found = pointer.and_then(|pointer| Some((pointer.to_owned(), self.document.pointer(pointer)?)));
        let Some((pointer, schema)) = found else {
            return Err(ApiError::invalid(path, format!("{path} is {target}, which is nothing in this schema")));
        };
        if let Some(from) = &self.begins {
            if self.may_begin(&pointer, from) {
                let why = "leads back to itself before any text; put it into an object or a list";
                return Err(ApiError::invalid(path, format!("{path} is {target}, which {why}")));
            }
            self.leads.push((from.clone(), pointer.clone()));
        }
        if let Some(name) = self.refs.get(&pointer) {
            return Ok(name.clone());
        }
        let at = self.rules.len();
        let name = self.rule("")?;
        self.refs.insert(pointer.clone(), name.clone());
        let begins = self.begins.replace(pointer);
        let body = self.schema(schema, path, depth + 1)?;
        self.begins = begins;
        self.define(at, &name, &body)?;
        Ok(name)
    }

    /// Whether the texts of pointer `from` may begin with those of `to`, as far as is known.
    fn may_begin(&self, from: &str, to: &str) -> bool {
        let mut reached = vec![from];
        let mut at = 0;
        while let Some(&pointer) = reached.get(at) {
            if pointer == to {
                return true;
            }
            for (_, next) in self.leads.iter().filter(|(from, _)| from == pointer) {
                if !reached.contains(&next.as_str()) {
                    reached.push(next);
                }
            }
            at += 1;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rules(schema: &Value) -> String {
        let grammar = json_schema(schema, "schema").unwrap_or_else(|error| panic!("{schema}: {}", error.message));
        grammar.strip_suffix(JSON).expect("JSON's rules are the last").to_owned()
    }

    #[test]
    fn schemas_become_rules() {
        assert_eq!(rules(&json!({"type": "integer", "title": "x"})), "root ::= integer\n");
        let bounded = json!({"type": "integer", "exclusiveMinimum": 0, "maximum": 3});
        assert_eq!(rules(&bounded), "root ::= r0\nr0 ::= ([1-3])\n");
        assert_eq!(rules(&json!({})), "root ::= value\n");
        assert_eq!(
            rules(&json!({"enum": ["a\"b", 1, null]})),
            "root ::= r0\nr0 ::= \"\\\"a\\\\\\\"b\\\"\" | \"1\" | \"null\"\n"
        );
        assert_eq!(
            rules(&json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3})),
            "root ::= r0\nr0 ::= \"[\" ws boolean (ws \",\" ws boolean){0,2} ws \"]\"\n"
        );
        assert_eq!(
            rules(&json!({"type": "string", "maxLength": 4})),
            "root ::= r0\nr0 ::= \"\\\"\" char{0,4} \"\\\"\"\n"
        );
        assert_eq!(rules(&json!({"type": "string", "enum": [1, "a"]})), "root ::= r0\nr0 ::= \"\\\"a\\\"\"\n");
        assert_eq!(rules(&json!({"type": "integer", "const": 1.0})), "root ::= \"1.0\"\n");
        assert_eq!(rules(&json!({"type": ["string", "null"]})), "root ::= r0\nr0 ::= string | null\n");
    }

    #[test]
    fn properties_keep_their_order_and_optional_ones_may_be_left_out() {
        let schema = json!({
            "properties": {"b": {"type": "null"}, "a": {"type": "null"}, "c": {"type": "null"}}, "required": ["a"],
        });
        let want = "root ::= r5\nr0 ::= \"\\\"b\\\"\" ws \":\" ws null\nr1 ::= \"\\\"a\\\"\" ws \":\" ws null\n\
                    r2 ::= \"\\\"c\\\"\" ws \":\" ws null\nr3 ::= (ws \",\" ws r2)? \nr4 ::= (ws \",\" ws r1) r3\n\
                    r5 ::= \"{\" ws (r0 r4 | r1 r3) ws \"}\"\n";
        assert_eq!(rules(&schema), want);
    }

    #[test]
    fn a_schema_may_refer_to_itself() {
        let schema = json!({
            "$ref": "#/$defs/node",
            "$defs": {"node": {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
        });
        assert!(rules(&schema).starts_with("root ::= r0\nr0 ::= r3\nr1 ::= r0 | null\n"), "{}", rules(&schema));
    }

    #[test]
    fn one_of_schemas_that_are_apart_is_any_of_them() {
        let choices = json!([{"type": "string"}, {"type": "null"}]);
        assert_eq!(rules(&json!({ "oneOf": choices })), rules(&json!({ "anyOf": choices })));
        let error =
            json_schema(&json!({"oneOf": [{"type": "null"}, {}, {"type": "null"}]}), "schema").expect_err("alike");
        assert!(
            error.message.starts_with("schema.oneOf has schemas 0 and 1, which one value may be both of"),
            "{error:?}"
        );
    }

    // Symptom: of 100 constants, two that differ were said to be alike: the pairs to look at had run out before them.
    #[test]
    fn one_of_more_schemas_than_are_compared_is_refused_by_their_number() {
        let of = |n: usize| {
            let choices: Vec<_> = (0..n).map(|at| json!({"const": format!("v{at}")})).collect();
            json_schema(&json!({ "oneOf": choices }), "schema")
        };
        assert!(of(apart::MAX_CHOICES).is_ok());
        let error = of(apart::MAX_CHOICES + 1).expect_err("one too many");
        assert!(
            error.message.starts_with("schema.oneOf has 65 schemas, of which at most 64 are compared"),
            "{error:?}"
        );
    }

    // Symptom: {"$ref": "#"} was refused as a wrong `grammar`, which the request did not have.
    #[test]
    fn a_schema_that_is_itself_before_any_text_is_refused_by_its_ref() {
        let end = json!({"type": "null"});
        let object = json!({"properties": {"p": {"$ref": "#/$defs/b"}}});
        for (schema, path, target) in [
            (json!({"$ref": "#"}), "schema.$ref", "#"),
            (json!({"anyOf": [end, {"$ref": "#"}]}), "schema.anyOf[1].$ref", "#"),
            (
                json!({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
                "schema.items.$ref.allOf[0].$ref",
                "#/$defs/a",
            ),
            (
                // The rule of `b` is there, and begins with `a`, before `a` begins with it.
                json!({"$ref": "#/$defs/a", "$defs": {
                    "a": {"anyOf": [object, {"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, end]},
                }}),
                "schema.$ref.anyOf[1].$ref",
                "#/$defs/b",
            ),
        ] {
            let error = json_schema(&schema, "schema").expect_err(path);
            let want = format!("{path} is {target:?}, which leads back to itself before any text");
            assert_eq!(error.param.as_deref(), Some(path), "{}", error.message);
            assert!(error.message.starts_with(&want), "{}", error.message);
        }
        for schema in [json!({"items": {"$ref": "#"}}), json!({"properties": {"x": {"$ref": "#"}}})] {
            assert!(json_schema(&schema, "schema").is_ok(), "{schema}");
        }
    }

    #[test]
    fn what_can_not_be_held_is_refused_by_its_path() {
        let mut deep = json!({});
        for _ in 0..60 {
            deep = json!({ "items": deep });
        }
        let wide: Vec<String> = (0..9000).map(|i| format!("value number {i}")).collect();
        for (schema, path) in [
            (json!(1), "schema"),
            (json!(false), "schema"),
            (json!({"type": "date"}), "schema.type"),
            (json!({"type": []}), "schema.type"),
            (json!({"type": "string", "pattern": "a+"}), "schema.pattern"),
            (json!({"properties": {"x": {"minimum": 3}}}), "schema.properties.x.minimum"),
            (json!({"type": "number", "minimum": 3, "maximum": 2.5}), "schema.maximum"),
            (json!({"type": "integer", "minimum": 1e300}), "schema.minimum"),
            // Symptom: these were as good as not there.
            (json!({"properties": {"x": {}}, "required": "x"}), "schema.required"),
            (json!({"properties": {"x": {}}, "required": [1]}), "schema.required[0]"),
            (json!({"properties": {"x": {}}, "additionalProperties": 1}), "schema.additionalProperties"),
            (json!({"type": ["string", 1]}), "schema.type[1]"),
            (json!({"type": "string", "enum": [1, 2]}), "schema.enum"),
            (json!({"type": "string", "const": 1}), "schema.const"),
            (json!({"type": "integer", "minimum": "a"}), "schema.minimum"),
            (json!({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}), "schema.exclusiveMaximum"),
            (json!({"properties": {}, "required": ["x"]}), "schema.required"),
            (json!({"allOf": [{}, {}]}), "schema.allOf"),
            // Symptom: the model might write what is of both, as if anyOf had been asked for.
            (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "schema.oneOf"),
            (json!({"anyOf": []}), "schema.anyOf"),
            (json!({"enum": []}), "schema.enum"),
            (json!({"$ref": "#/nowhere"}), "schema.$ref"),
            (json!({"$ref": "http://x"}), "schema.$ref"),
            (json!({"items": {}, "minItems": 3, "maxItems": 2}), "schema.maxItems"),
            (json!({"type": "string", "maxLength": 5000}), "schema.maxLength"),
            (json!({"enum": wide}), "schema"),
        ] {
            let error = json_schema(&schema, "schema").expect_err(path);
            assert_eq!(error.param.as_deref(), Some(path), "{}", error.message);
        }
        assert!(json_schema(&deep, "schema").expect_err("too deep").message.contains("nested more than"));
    }
}
