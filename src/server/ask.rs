use std::sync::Arc;

use serde_json::Value;

use crate::{
    route::PolicyKind,
    schedule::Priority,
    types::{SamplingParams, Token},
};

use super::{
    error::ApiError,
    fields::{Fields, whole, wrong_kind},
    refused, samplers, schema,
};

/// Stop strings of a request at most, and bytes of each.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// Tokens whose logits a request may change.
const MAX_BIASES: usize = 1024;
/// Likeliest tokens a request may see.
pub(super) const MAX_LOGPROBS: u64 = 20;

/// Generated tokens that penalties look back at, at most.
const MAX_LAST: u64 = 1 << 20;
/// What llama-server takes for no seed: -1 as it is kept there.
const RANDOM: u64 = u32::MAX as u64;

/// The fields of a request's `eldr`.
const ELDR: [&str; 4] = ["policy", "explain", "domain", "priority"];

/// What every kind of generation can be asked for.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "fields of a request, each independent")]
pub(super) struct Ask {
    pub sampling: SamplingParams,
    /// As many as fit without it.
    pub max_tokens: Option<u32>,
    pub stops: Vec<String>,
    /// Answers to each prompt.
    pub n: usize,
    pub stream: bool,
    pub include_usage: bool,
    /// Each part of a stream says how long it took so far.
    pub timings_per_token: bool,
    /// Compute the whole prompt, whatever a worker holds of it.
    pub fresh: bool,
    /// Say how the request was routed.
    pub explain: bool,
    pub domain: Option<String>,
    /// In the queue.
    pub priority: Priority,
    /// The policy that places it, where that is not the server's.
    pub policy: Option<PolicyKind>,
}

impl Ask {
    /// Reads the fields that completions and chat share. `seed` is taken where none is given; `policy` is the one in
    /// use.
    pub fn read(fields: &Fields<'_>, seed: u64, policy: &str, max_choices: usize) -> Result<Self, ApiError> {
        refused::check(fields)?;
        let eldr = fields.object("eldr")?;
        eldr.as_ref().map_or(Ok(()), |eldr| eldr.only(&ELDR))?;
        let asked = eldr.as_ref().map_or(Ok(None), other_policy)?;
        let eldr = |read: &dyn Fn(&Fields<'_>) -> Result<bool, ApiError>| eldr.as_ref().map_or(Ok(false), read);
        let stream = fields.flag("stream")?.unwrap_or(false);
        let options = fields.object("stream_options")?;
        if options.is_some() && !stream {
            return Err(ApiError::invalid("stream_options", "stream_options is only for requests with stream: true"));
        }
        Ok(Self {
            sampling: constrained(fields, sampling(fields, seed)?)?,
            max_tokens: max_tokens(fields)?,
            stops: stops(fields)?,
            n: n_choices(fields, max_choices)?,
            stream,
            timings_per_token: fields.flag("timings_per_token")?.unwrap_or(false),
            fresh: !fields.flag("cache_prompt")?.unwrap_or(true),
            include_usage: options.map_or(Ok(None), |options| options.flag("include_usage"))?.unwrap_or(false),
            explain: eldr(&|eldr| Ok(eldr.flag("explain")?.unwrap_or(false)))?,
            priority: fields.object("eldr")?.map_or(Ok(Priority::Normal), |eldr| priority(&eldr))?,
            policy: asked.filter(|kind| kind.name() != policy),
            domain: fields.object("eldr")?.map_or(Ok(None), |eldr| eldr.text("domain"))?.map(str::to_owned),
        })
    }
}

/// Answers to each prompt, by OpenAI's name or llama-server's.
fn n_choices(fields: &Fields<'_>, most: usize) -> Result<usize, ApiError> {
    let given = |name: &str| fields.whole(name, 1..=most as u64);
    Ok(given("n_cmpl")?.or(given("n")?).unwrap_or(1) as usize)
}

/// llama-server's way to ask how likely tokens were: for so many of the likeliest, or, for 0, not at all.
pub(super) fn n_probs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    Ok(fields.whole("n_probs", 0..=MAX_LOGPROBS)?.filter(|&n| n > 0).map(|n| n as u32))
}

/// The policy a request asks for; `auto` is the server's own.
fn other_policy(eldr: &Fields<'_>) -> Result<Option<PolicyKind>, ApiError> {
    let Some(name) = eldr.text("policy")? else { return Ok(None) };
    let path = eldr.path("policy");
    let kind: PolicyKind = name.parse().map_err(|error| ApiError::invalid(&path, format!("{path}: {error}")))?;
    Ok(Some(kind).filter(|&kind| kind != PolicyKind::Auto))
}

fn priority(eldr: &Fields<'_>) -> Result<Priority, ApiError> {
    match eldr.text("priority")? {
        None | Some("normal") => Ok(Priority::Normal),
        Some("high") => Ok(Priority::High),
        Some(other) => {
            let path = eldr.path("priority");
            Err(ApiError::invalid(&path, format!("{path} is {other:?}; it must be high or normal")))
        }
    }
}

fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    for name in ["max_completion_tokens", "max_tokens", "n_predict"] {
        if let Some(n) = fields.whole_or(name, 1..=u64::from(u32::MAX), u64::MAX)? {
            return Ok(u32::try_from(n).ok());
        }
    }
    Ok(None)
}

/// The defaults are llama-server's.
fn sampling(fields: &Fields<'_>, seed: u64) -> Result<SamplingParams, ApiError> {
    let penalty = |name: &str| Ok(fields.number(name, -2.0..=2.0)?.unwrap_or(0.0));
    let mut sampling = SamplingParams {
        temperature: fields.number("temperature", 0.0..=100.0)?.unwrap_or(0.8),
        top_k: fields.whole_or("top_k", 0..=u64::from(u32::MAX), 0)?.unwrap_or(40) as u32,
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(0.95),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.05),
        penalty_repeat: fields.number("repeat_penalty", 0.01..=100.0)?.unwrap_or(1.0),
        penalty_freq: penalty("frequency_penalty")?,
        penalty_present: penalty("presence_penalty")?,
        penalty_last_n: fields.whole_or("repeat_last_n", 0..=MAX_LAST, MAX_LAST)?.unwrap_or(64) as u32,
        seed: fields.whole_or("seed", 0..=u64::MAX, RANDOM)?.filter(|&given| given != RANDOM).unwrap_or(seed),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        logit_bias: logit_bias(fields)?,
        grammar: fields.text("grammar")?.filter(|text| !text.is_empty()).map(Arc::from),
        n_logprobs: None,
    };
    samplers::apply(fields, &mut sampling)?;
    Ok(sampling)
}

/// Holds the text to a grammar, where one of the fields that ask for that is there.
fn constrained(fields: &Fields<'_>, mut sampling: SamplingParams) -> Result<SamplingParams, ApiError> {
    let mut asked = sampling.grammar.is_some().then_some("grammar");
    for (name, grammar) in [("response_format", response_format(fields)?), ("json_schema", bare_schema(fields)?)] {
        let Some(grammar) = grammar else { continue };
        if let Some(other) = asked {
            return Err(ApiError::invalid(
                name,
                format!("{name} and {other} both say what the text must be; give one"),
            ));
        }
        asked = Some(name);
        sampling.grammar = Some(grammar.into());
    }
    if sampling.grammar.is_some() && sampling.ignore_eos {
        return Err(ApiError::invalid(
            "ignore_eos",
            "ignore_eos goes on past the end that a grammar puts; leave one out",
        ));
    }
    Ok(sampling)
}

fn response_format(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    format.required("type")?;
    match format.text("type")?.unwrap_or_default() {
        "text" => Ok(None),
        "json_object" => match format.get("schema") {
            Some(schema) => schema::json_schema(schema, &format.path("schema")).map(Some),
            None => Ok(Some(schema::json_object())),
        },
        "json_schema" => {
            format.required("json_schema")?;
            let outer = format.object("json_schema")?.unwrap_or_else(|| format.clone());
            schema::json_schema(outer.required("schema")?, &outer.path("schema")).map(Some)
        }
        other => {
            let path = format.path("type");
            let why = format!("{path} is {other:?}; it must be text, json_object or json_schema");
            Err(ApiError::invalid(&path, why))
        }
    }
}

/// llama-server's way to give a schema.
fn bare_schema(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    fields.get("json_schema").map(|schema| schema::json_schema(schema, "json_schema")).transpose()
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let path = fields.path("stop");
    let stops: Vec<&Value> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::Array(stops)) => stops.iter().collect(),
        Some(one) => vec![one],
    };
    if stops.len() > MAX_STOPS {
        let n = stops.len();
        return Err(ApiError::invalid(&path, format!("{path} has {n} strings; {MAX_STOPS} are allowed")));
    }
    let texts = stops.into_iter().enumerate().map(|(index, stop)| {
        let path =
            if fields.get("stop").is_some_and(Value::is_array) { format!("{path}[{index}]") } else { path.clone() };
        let text = stop.as_str().ok_or_else(|| wrong_kind(&path, "a string", stop))?;
        if text.len() > MAX_STOP_BYTES {
            return Err(ApiError::invalid(&path, format!("{path} is longer than {MAX_STOP_BYTES} bytes")));
        }
        Ok(text.to_owned())
    });
    // An empty one would end every text before it begins; llama-server leaves it out, too.
    texts.filter(|text| !text.as_ref().is_ok_and(String::is_empty)).collect()
}

/// OpenAI's map from tokens to numbers, or llama-server's list of pairs; `false` forbids a token.
fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(Token, f32)>, ApiError> {
    let path = fields.path("logit_bias");
    let pairs: Vec<(String, Result<u64, ApiError>, &Value)> = match fields.get("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => {
            let read = |(key, bias)| {
                let path = format!("{path}.{key}");
                let token = String::as_str(key).parse::<u64>();
                let token = token.map_err(|_| ApiError::invalid(&path, format!("{path} names no token by its number")));
                (path, token, bias)
            };
            map.iter().map(read).collect()
        }
        Some(Value::Array(list)) => {
            let read = |(index, pair): (usize, &'_ Value)| {
                let path = format!("{path}[{index}]");
                let parts = pair.as_array().filter(|parts| parts.len() == 2);
                let token = parts.map_or_else(
                    || Err(ApiError::invalid(&path, format!("{path} must be a pair: a token and a number"))),
                    |parts| whole(&parts[0], &path, 0..=i32::MAX as u64),
                );
                (path, token, index)
            };
            let read: Vec<_> = list.iter().enumerate().map(read).collect();
            read.into_iter()
                .map(|(path, token, index)| (path, token, list[index].get(1).unwrap_or(&Value::Null)))
                .collect()
        }
        Some(other) => return Err(wrong_kind(&path, "an object", other)),
    };
    if pairs.len() > MAX_BIASES {
        let n = pairs.len();
        return Err(ApiError::invalid(&path, format!("{path} has {n} tokens; {MAX_BIASES} are allowed")));
    }
    let mut biases = Vec::with_capacity(pairs.len());
    for (path, token, bias) in pairs {
        let token = Token::try_from(token?).map_err(|_| ApiError::invalid(&path, format!("{path} names no token")))?;
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => other.as_f64().ok_or_else(|| wrong_kind(&path, "a number", other))? as f32,
        };
        if bias.is_nan() || bias > 1000.0 {
            return Err(ApiError::invalid(&path, format!("{path} must be between -1000 and 1000")));
        }
        biases.push((token, if bias < -1000.0 { f32::NEG_INFINITY } else { bias }));
    }
    biases.sort_by_key(|&(token, _)| token);
    if let Some(twice) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(ApiError::invalid(&path, format!("{path} names token {} twice", twice[0].0)));
    }
    Ok(biases)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Result<Ask, ApiError> {
        Ask::read(&Fields::of(body, "").expect("an object"), 7, "least_loaded", 4)
    }

    #[test]
    fn nothing_given_is_the_default() {
        let ask = read(&json!({})).expect("valid");
        assert_eq!((ask.n, ask.stream, ask.max_tokens, ask.sampling.seed), (1, false, None, 7));
        assert!(ask.stops.is_empty() && ask.sampling.logit_bias.is_empty());
    }

    #[test]
    fn every_field_is_read() {
        let ask = read(&json!({
            "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.5, "frequency_penalty": -1,
            "presence_penalty": 2, "repeat_last_n": 9, "seed": 11, "ignore_eos": true, "max_tokens": 5, "n": 2,
            "stop": ["a", ""], "stream": true, "stream_options": {"include_usage": true}, "logit_bias": {"5": -100, "2": 1},
            "eldr": {"policy": "least_loaded", "explain": true, "domain": "code", "priority": "high"}, "user": "me", "unknown": [1],
        }))
        .expect("valid");
        assert_eq!((ask.n, ask.stream, ask.include_usage, ask.max_tokens), (2, true, true, Some(5)));
        assert_eq!(ask.priority, Priority::High);
        assert_eq!((ask.stops, ask.explain, ask.domain.as_deref()), (vec!["a".to_owned()], true, Some("code")));
        assert_eq!(ask.sampling.logit_bias, [(2, 1.0), (5, -100.0)]);
        let sampling = SamplingParams { logit_bias: Vec::new(), ..ask.sampling };
        let want = SamplingParams {
            temperature: 0.0,
            top_k: 3,
            top_p: 0.5,
            min_p: 0.1,
            penalty_repeat: 1.5,
            penalty_freq: -1.0,
            penalty_present: 2.0,
            penalty_last_n: 9,
            seed: 11,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        assert_eq!(sampling, want);
    }

    // Symptom: what clients of llama-server send for "no limit" and "any seed" was refused.
    #[test]
    fn minus_one_is_no_limit_and_no_seed() {
        for name in ["max_tokens", "max_completion_tokens", "n_predict"] {
            assert_eq!(read(&json!({ name: -1 })).expect("valid").max_tokens, None, "{name}");
        }
        let open = read(&json!({"seed": -1, "top_k": -1, "repeat_last_n": -1})).expect("valid").sampling;
        assert_eq!((open.seed, open.top_k, open.penalty_last_n), (7, 0, 1 << 20));
        assert_eq!(read(&json!({"seed": u32::MAX})).expect("valid").sampling.seed, 7);
    }

    // Symptom: these fields of llama-server's were taken and nothing was done about them.
    #[test]
    fn the_fields_of_llama_servers_that_mean_something_here_are_read() {
        let ask = read(&json!({"cache_prompt": false, "timings_per_token": true, "n_cmpl": 3})).expect("valid");
        assert_eq!((ask.fresh, ask.timings_per_token, ask.n), (true, true, 3));
        let ask = read(&json!({"cache_prompt": true})).expect("valid");
        assert_eq!((ask.fresh, ask.timings_per_token, ask.n), (false, false, 1));
        let probs = |body: &Value| n_probs(&Fields::of(body, "").expect("an object"));
        assert_eq!(probs(&json!({"n_probs": 3})), Ok(Some(3)));
        assert_eq!((probs(&json!({"n_probs": 0})), probs(&json!({}))), (Ok(None), Ok(None)));
        assert!(probs(&json!({"n_probs": 21})).is_err());
    }

    #[test]
    fn another_policy_is_read_and_the_servers_own_is_none() {
        let policy = |name: &str| read(&json!({"eldr": {"policy": name}})).expect("a policy").policy;
        assert_eq!(policy("random"), Some(PolicyKind::Random));
        assert_eq!((policy("least_loaded"), policy("auto")), (None, None));
    }

    #[test]
    fn a_list_of_pairs_is_a_bias_too() {
        let ask = read(&json!({"logit_bias": [[9, false], [3, 0.5]]})).expect("valid");
        assert_eq!(ask.sampling.logit_bias, [(3, 0.5), (9, f32::NEG_INFINITY)]);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (body, param) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": 1.5}), "top_p"),
            (json!({"n": 5}), "n"),
            (json!({"n": 0}), "n"),
            (json!({"n_cmpl": 5}), "n_cmpl"),
            (json!({"cache_prompt": 1}), "cache_prompt"),
            (json!({"timings_per_token": "yes"}), "timings_per_token"),
            (json!({"samplers": ["infill"]}), "samplers"),
            (json!({"mirostat": 1}), "mirostat"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -2}), "max_tokens"),
            (json!({"n_predict": -1.5}), "n_predict"),
            (json!({"seed": -2}), "seed"),
            (json!({"seed": 1.5}), "seed"),
            (json!({"stop": ["a", 1]}), "stop[1]"),
            (json!({"stop": 3}), "stop"),
            (json!({"stop": "x".repeat(2000)}), "stop"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (json!({"stream": 1}), "stream"),
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
            (json!({"logit_bias": {"1": "y"}}), "logit_bias.1"),
            (json!({"logit_bias": [[1]]}), "logit_bias[0]"),
            (json!({"logit_bias": [[1, 2], [1, 3]]}), "logit_bias"),
            (json!({"logit_bias": 4}), "logit_bias"),
            (json!({"grammar": 4}), "grammar"),
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}}),
                "response_format.json_schema.schema.type",
            ),
            (json!({"response_format": {"type": "json_object"}, "grammar": "root ::= \"a\""}), "response_format"),
            (json!({"json_schema": {}, "ignore_eos": true}), "ignore_eos"),
            (json!({"eldr": {"policy": "fastest"}}), "eldr.policy"),
            (json!({"eldr": {"explain": 1}}), "eldr.explain"),
            (json!({"eldr": {"priority": "low"}}), "eldr.priority"),
            (json!({"eldr": {"priority": 3}}), "eldr.priority"),
        ] {
            let error = read(&body).expect_err(param);
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
    }

    // Symptom: {"eldr": {"polcy": "random"}} was routed by the server's policy without a word.
    #[test]
    fn an_unknown_field_of_eldr_is_refused() {
        let error = read(&json!({"eldr": {"explain": true, "polcy": "random"}})).expect_err("unknown");
        assert_eq!(error.param.as_deref(), Some("eldr.polcy"));
        assert_eq!(
            error.message,
            "eldr.polcy is not a field of eldr; its fields are policy, explain, domain, priority"
        );
    }
}
