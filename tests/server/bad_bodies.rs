//! Bodies that can not be answered: each is refused with its field's path, none is a server error, none leaves anything
//! behind.

use eldr::{
    rng::Rng,
    schedule::DispatchLimits,
    server::{ModelCard, ServerConfig},
};
use serde_json::{Value, json};

use super::world::{N_CTX_SLOT, Reply, World};

#[test]
fn wrong_requests_are_refused_with_the_fields_path() {
    let world = World::start();
    let hi = || json!([{"role": "user", "content": "hi"}]);
    let long = "x".repeat(N_CTX_SLOT as usize + 1);
    let cases = [
        ("/v1/completions", json!({}), "prompt"),
        ("/v1/completions", json!({"prompt": ""}), "prompt"),
        ("/v1/completions", json!({"prompt": 5}), "prompt"),
        ("/v1/completions", json!({"prompt": []}), "prompt"),
        ("/v1/completions", json!({"prompt": ["a", ["b"]]}), "prompt[1][0]"),
        ("/v1/completions", json!({"prompt": [1, 9999]}), "prompt"),
        ("/v1/completions", json!({"prompt": [1, -1]}), "prompt[1]"),
        ("/v1/completions", json!({"prompt": vec!["a"; 17]}), "prompt"),
        ("/v1/completions", json!({"prompt": vec!["a"; 9], "n": 2}), "prompt"),
        ("/v1/completions", json!({"prompt": long.clone()}), "prompt"),
        ("/v1/completions", json!({"prompt": "a", "n": 17}), "n"),
        ("/v1/completions", json!({"prompt": "a", "temperature": -1}), "temperature"),
        ("/v1/completions", json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        ("/v1/completions", json!({"prompt": "a", "echo": true}), "echo"),
        ("/v1/completions", json!({"prompt": "a", "best_of": 2}), "best_of"),
        ("/v1/completions", json!({"prompt": "a", "n_probs": 21}), "n_probs"),
        ("/v1/completions", json!({"prompt": "a", "mirostat": 2}), "mirostat"),
        ("/v1/completions", json!({"prompt": "a", "cache_prompt": "no"}), "cache_prompt"),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": {"300": 1}}), "logit_bias"),
        ("/v1/completions", json!({"prompt": "a", "grammar": "root ::= \"a\""}), "grammar"),
        ("/v1/chat/completions", json!({}), "messages"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": long}]}), "messages"),
        ("/v1/chat/completions", json!({"messages": hi(), "top_logprobs": 2}), "top_logprobs"),
        ("/v1/chat/completions", json!({"messages": hi(), "n_probs": -1}), "n_probs"),
        ("/v1/chat/completions", json!({"messages": hi(), "functions": [{"name": "f"}]}), "functions"),
        ("/v1/chat/completions", json!({"messages": hi(), "parallel_tool_calls": 0}), "parallel_tool_calls"),
        ("/v1/chat/completions", json!({"messages": hi(), "tools": [{}]}), "tools[0].function"),
        ("/v1/chat/completions", json!({"messages": hi(), "tools": [{"function": {}}]}), "tools[0].function.name"),
        ("/v1/chat/completions", json!({"messages": hi(), "tool_choice": "required"}), "tool_choice"),
        ("/v1/chat/completions", json!({"messages": hi(), "chat_template_kwargs": 1}), "chat_template_kwargs"),
        ("/tokenize", json!({}), "content"),
        ("/tokenize", json!({"content": 1}), "content"),
        ("/detokenize", json!({"tokens": [1, 257]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/v1/eldr/explain", json!({"prompt": ""}), "prompt"),
    ];
    for (path, body, param) in cases {
        let reply = world.post(path, &body);
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["param"]), (400, &json!(param)), "{path} {body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        let message = error["message"].as_str().unwrap();
        assert!(message.len() > 10 && message.is_ascii(), "{message}");
    }
    assert!(world.wait_idle());
}

#[test]
fn what_is_no_request_is_refused() {
    let world = World::start();
    for body in ["", "{", "[]", "1", "null", "\"x\"", "{\"prompt\": \"a\"} x", "{\"prompt\": \"\\ud800\"}", "nul"] {
        let reply = world.post_text("/v1/completions", body.as_bytes());
        assert_eq!((reply.status, &reply.json()["error"]["type"]), (400, &json!("invalid_request_error")), "{body}");
    }
    assert_eq!(world.post_text("/v1/completions", &[0xff, 0xfe, b'{']).status, 400);
    assert_eq!(world.post_text("/v1/completions", "[".repeat(100_000).as_bytes()).status, 400);
    let missing = world.get("/v1/nothing");
    assert_eq!((missing.status, &missing.json()["error"]["type"]), (404, &json!("invalid_request_error")));
    assert_eq!(world.get("/v1/completions").status, 405);
    assert_eq!(world.get("/v1/eldr/explain?id=cmpl-no").status, 404);
    assert_eq!(world.get("/v1/eldr/explain").status, 400);
    let small = World::with(
        ServerConfig { max_body: 1000, ..ServerConfig::default() },
        DispatchLimits::default(),
        ModelCard::default(),
    );
    let large = json!({"prompt": "x".repeat(2000)}).to_string();
    let refused = Reply::read(small.send("POST", "/v1/completions", &large, &[]));
    assert_eq!((refused.status, refused.json()["error"]["type"].is_string()), (413, true));
}

// Symptom: a query that gives an id twice, and a path that is not UTF-8, were answered in plain text.
#[test]
fn a_query_or_path_that_can_not_be_read_is_answered_as_any_error() {
    let world = World::start();
    let twice = world.get("/v1/eldr/explain?id=a&id=b");
    let why = "the query can not be read: duplicate field `id`; give each of its fields once";
    let error = json!({"message": why, "type": "invalid_request_error", "param": null, "code": null});
    assert_eq!((twice.status, &twice.json()["error"]), (400, &error));
    for verb in ["drain", "resume"] {
        let torn = world.post(&format!("/v1/eldr/workers/%ff/{verb}"), &json!({}));
        assert_eq!((torn.status, &torn.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    }
}

/// One field of a sound request is replaced by, or gets, something else.
fn spoil(rng: &mut Rng, body: &mut Value) {
    const FIELDS: [&str; 20] = [
        "prompt",
        "messages",
        "n",
        "stream",
        "max_tokens",
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "stream_options",
        "eldr",
        "grammar",
        "response_format",
        "user",
        "min_p",
    ];
    let value = match rng.below(12) {
        0 => json!(null),
        1 => json!(true),
        2 => json!(-1),
        3 => json!(rng.next_u64()),
        4 => json!(rng.uniform() * 4.0 - 1.0),
        5 => json!(""),
        6 => json!("\u{0}\u{1f600}\n"),
        7 => json!([]),
        8 => json!({}),
        9 => json!([[1, 2], {"a": "b"}, "c", null, 1e300]),
        10 => json!({"role": "user", "content": [{"type": "text"}], "function": {"name": 3}, "include_usage": "x"}),
        _ => json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
    };
    body[FIELDS[rng.below(FIELDS.len())]] = value;
}

#[test]
fn no_spoilt_body_is_a_server_error_or_leaves_a_slot_taken() {
    let world = World::start();
    let mut rng = Rng::new(77);
    for round in 0..600 {
        let chat = round % 2 == 0;
        let mut body = if chat {
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        } else {
            json!({"prompt": "hi", "max_tokens": 4})
        };
        for _ in 0..=rng.below(3) {
            spoil(&mut rng, &mut body);
        }
        let mut text = body.to_string().into_bytes();
        if rng.below(4) == 0 {
            let at = rng.below(text.len());
            text[at] = rng.below(256) as u8;
        }
        let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
        let reply = world.post_text(path, &text);
        assert!(reply.status == 200 || reply.status == 400, "{}: {body}: {}", reply.status, reply.body);
    }
    assert!(world.wait_idle());
    assert_eq!(world.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).status, 200);
}
