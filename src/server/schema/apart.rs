//! Whether no value can be of two schemas at once, which is what `oneOf` promises.
//!
//! Never says so of two that have a value in common: what it can not tell apart is not apart.

use serde_json::Value;

use super::parts::is_of;

/// Pairs of schemas that are looked at for one `oneOf`, and pairs inside of one another: they may refer to one another.
const MAX_PAIRS: usize = 4096;
/// Schemas of one `oneOf`: each pair is looked at, with as many pairs left for what is inside of them.
pub(super) const MAX_CHOICES: usize = 64;
const MAX_DEPTH: usize = 96;

/// Two of `choices` that one value may be of, by their places. References point into `document`.
pub(super) fn alike(document: &Value, choices: &[Value]) -> Option<(usize, usize)> {
    let mut reader = Reader { document, n_left: MAX_PAIRS, depth: 0 };
    let mut pairs = (0..choices.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    pairs.find(|&(a, b)| !reader.are_apart(&choices[a], &choices[b]))
}

struct Reader<'a> {
    document: &'a Value,
    n_left: usize,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn are_apart(&mut self, a: &'a Value, b: &'a Value) -> bool {
        if self.n_left == 0 || self.depth == MAX_DEPTH {
            return false;
        }
        self.n_left -= 1;
        self.depth += 1;
        let are_apart = self.look(a, b);
        self.depth -= 1;
        are_apart
    }

    fn look(&mut self, a: &'a Value, b: &'a Value) -> bool {
        for (one, other) in [(a, b), (b, a)] {
            if let Some(target) = one.get("$ref") {
                let pointer = target.as_str().and_then(|target| target.strip_prefix('#'));
                let found = pointer.and_then(|pointer| self.document.pointer(pointer));
                return found.is_some_and(|found| self.are_apart(found, other));
            }
            if let Some(choices) = ["anyOf", "oneOf", "allOf"].iter().find_map(|key| one.get(*key)?.as_array()) {
                return choices.iter().all(|choice| self.are_apart(choice, other));
            }
        }
        match (values(a), values(b)) {
            (Some(values), _) => values.into_iter().all(|value| rejects(b, value)),
            (_, Some(values)) => values.into_iter().all(|value| rejects(a, value)),
            (None, None) => self.kinds_are_apart(a, b),
        }
    }

    /// By the types of each; two that may both be objects by a property that tells them apart.
    fn kinds_are_apart(&mut self, a: &'a Value, b: &'a Value) -> bool {
        let (Some(of_a), Some(of_b)) = (kinds(a), kinds(b)) else { return false };
        let pairs = of_a.iter().flat_map(|&a| of_b.iter().map(move |&b| (a, b)));
        let mut common = pairs.filter(|&(a, b)| a == b || (is_number(a) && is_number(b)));
        common.all(|(kind, _)| kind == "object" && self.objects_are_apart(a, b))
    }

    /// One must have a property that the other must not have, or that is another there, which must have it, too.
    fn objects_are_apart(&mut self, a: &'a Value, b: &'a Value) -> bool {
        let is_closed = |schema: &Value| schema.get("additionalProperties") == Some(&Value::Bool(false));
        [(a, b), (b, a)].into_iter().any(|(one, other)| {
            required(one).any(|name| match (property(one, name), property(other, name)) {
                (_, None) => is_closed(other),
                (Some(own), Some(others)) => required(other).any(|known| known == name) && self.are_apart(own, others),
                (None, Some(_)) => false,
            })
        })
    }
}

fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

fn property<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    schema.get("properties")?.get(name)
}

fn is_number(kind: &str) -> bool {
    matches!(kind, "number" | "integer")
}

/// The only values of a schema, where it lists them.
fn values(schema: &Value) -> Option<Vec<&Value>> {
    let listed = match (schema.get("const"), schema.get("enum")) {
        (Some(one), _) => vec![one],
        (None, Some(Value::Array(values))) => values.iter().collect(),
        _ => return None,
    };
    let kinds = schema.get("type").and(kinds(schema));
    let is_of_kinds = |value: &&Value| kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|kind| is_of(value, kind)));
    Some(listed.into_iter().filter(is_of_kinds).collect())
}

/// The types of a schema, which properties and items name, too; none where any will do.
fn kinds(schema: &Value) -> Option<Vec<&str>> {
    match schema.get("type") {
        Some(Value::String(kind)) => Some(vec![kind]),
        Some(Value::Array(kinds)) => Some(kinds.iter().filter_map(Value::as_str).collect()),
        _ if schema.get("properties").is_some() => Some(vec!["object"]),
        _ if schema.get("items").is_some() => Some(vec!["array"]),
        _ => None,
    }
}

/// Whether a value is certainly not of a schema: by its type, or since it is not listed.
fn rejects(schema: &Value, value: &Value) -> bool {
    if let Some(values) = values(schema) {
        return !values.into_iter().any(|listed| may_equal(listed, value));
    }
    kinds(schema).is_some_and(|kinds| !kinds.iter().any(|kind| is_of(value, kind)))
}

/// 1 is 1.0, also inside of something: two lists, or two objects, are not looked into.
fn may_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => true,
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn apart(choices: &Value) -> bool {
        alike(
            &json!({"$defs": {"s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}),
            choices.as_array().expect("a list"),
        )
        .is_none()
    }

    #[test]
    fn what_types_constants_and_required_properties_tell_is_apart() {
        let tagged = |tag: &str| json!({"properties": {"kind": {"const": tag}, "n": {}}, "required": ["kind"]});
        let closed = |name: &str| json!({"properties": {name: {}}, "required": [name], "additionalProperties": false});
        for choices in [
            json!([{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}, {"items": {}}]),
            json!([{"enum": ["a", "b"]}, {"const": "c"}, {"type": "integer"}]),
            json!([{"type": "string", "enum": [1, "a"]}, {"const": 1}]),
            json!([tagged("a"), tagged("b"), {"type": "null"}]),
            json!([closed("a"), closed("b")]),
            json!([{"$ref": "#/$defs/s"}, {"anyOf": [{"type": "null"}, {"type": "number"}]}]),
        ] {
            assert!(apart(&choices), "{choices}");
        }
        let open = |name: &str| json!({"properties": {name: {}}, "required": [name]});
        for choices in [
            json!([{}, {"type": "string"}]),
            json!([{"type": "integer"}, {"type": "number"}]),
            json!([{"enum": [1]}, {"const": 1.0}]),
            json!([{"enum": ["a"]}, {"type": "string"}]),
            json!([open("a"), open("b")]),
            json!([{"properties": {"kind": {"const": "a"}}}, tagged("b")]),
            json!([{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]),
            json!([{"$ref": "#/$defs/s"}, {"enum": ["x"]}]),
            json!([{"$ref": "#/$defs/loop"}, {"type": "null"}]),
        ] {
            assert!(!apart(&choices), "{choices}");
        }
    }

    // Two schemas that refer to each other's choices are as many pairs as there is patience for.
    #[test]
    fn schemas_of_many_pairs_end() {
        let mut document = json!({"$defs": {"d0": {"type": "string"}}});
        for depth in 1..40 {
            let below = json!({"$ref": format!("#/$defs/d{}", depth - 1)});
            document["$defs"][format!("d{depth}")] = json!({"anyOf": [below, below]});
        }
        let choices = [json!({"$ref": "#/$defs/d39"}), json!({"type": "null"})];
        assert_eq!(alike(&document, &choices), Some((0, 1)));
    }

    /// Whether a value is of a schema: the few words that the schemas below use.
    fn is_valid(schema: &Value, value: &Value) -> bool {
        let said = |key: &str| schema.get(key);
        let same = |a: &Value, b: &Value| a == b || (a.is_number() && a.as_f64() == b.as_f64());
        said("const").is_none_or(|one| same(one, value))
            && said("enum").is_none_or(|list| list.as_array().expect("a list").iter().any(|one| same(one, value)))
            && said("type").is_none_or(|kind| is_of(value, kind.as_str().expect("a type")))
            && said("anyOf").is_none_or(|list| list.as_array().expect("a list").iter().any(|one| is_valid(one, value)))
            && value.as_object().is_none_or(|map| {
                let known = said("properties");
                required(schema).all(|name| map.contains_key(name))
                    && map.iter().all(|(name, value)| match known.and_then(|known| known.get(name)) {
                        Some(schema) => is_valid(schema, value),
                        None => said("additionalProperties") != Some(&Value::Bool(false)),
                    })
            })
    }

    fn scalar() -> impl Strategy<Value = Value> {
        prop::sample::select(vec![json!(null), json!(true), json!(1), json!(1.0), json!(2.5), json!("a"), json!("b")])
    }

    fn value() -> impl Strategy<Value = Value> {
        let object =
            prop::collection::btree_map(prop::sample::select(vec!["p".to_owned(), "q".to_owned()]), scalar(), 0..3);
        prop_oneof![scalar(), object.prop_map(|map| json!(map))]
    }

    fn schema() -> impl Strategy<Value = Value> {
        let kind = prop::sample::select(vec!["null", "boolean", "integer", "number", "string", "object"]);
        let leaf = prop_oneof![
            kind.prop_map(|kind| json!({ "type": kind })),
            scalar().prop_map(|one| json!({ "const": one })),
            prop::collection::vec(scalar(), 1..3).prop_map(|list| json!({ "enum": list })),
            Just(json!({})),
        ];
        leaf.prop_recursive(2, 8, 2, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 1..3).prop_map(|list| json!({ "anyOf": list })),
                (inner.clone(), inner, any::<[bool; 3]>()).prop_map(|(p, q, [needs_p, needs_q, open])| {
                    let needs = [("p", needs_p), ("q", needs_q)];
                    let needs: Vec<_> = needs.iter().filter(|(_, needed)| *needed).map(|(name, _)| *name).collect();
                    json!({"type": "object", "properties": {"p": p, "q": q}, "required": needs, "additionalProperties": open})
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_value_is_of_two_that_are_apart(a in schema(), b in schema(), values in prop::collection::vec(value(), 20)) {
            if alike(&json!({}), &[a.clone(), b.clone()]).is_none() {
                for value in values {
                    prop_assert!(!(is_valid(&a, &value) && is_valid(&b, &value)), "{} is of {} and of {}", value, a, b);
                }
            }
        }
    }
}
