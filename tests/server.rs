//! The HTTP server over fake workers: what clients are told, what they are refused, and what happens when they leave.
#![allow(clippy::unwrap_used)]

#[path = "server/bad_bodies.rs"]
mod bad_bodies;
#[path = "server/load.rs"]
mod load;
#[path = "server/world.rs"]
mod world;

use std::io::{BufRead as _, BufReader};

use eldr::{
    schedule::DispatchLimits,
    server::{Ended, ModelCard, ServerConfig},
};
use serde_json::{Value, json};
use world::{MODEL, N_CTX_SLOT, Reply, World, says};

#[test]
fn a_completion_is_what_the_model_says() {
    let world = World::start();
    let (text, n, ended) = says("Once upon", 5, 40);
    let body = json!({"prompt": "Once upon", "seed": 5, "max_tokens": 40, "eldr": {"explain": true}});
    let reply = world.post("/v1/completions", &body).json();
    assert_eq!(reply["choices"][0]["text"], text);
    assert_eq!(reply["choices"][0]["finish_reason"], if ended { "stop" } else { "length" });
    let usage = json!({"prompt_tokens": 9, "completion_tokens": n, "total_tokens": 9 + n,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(reply["usage"], usage);
    let timings = &reply["timings"];
    assert_eq!((&timings["cache_n"], &timings["prompt_n"], &timings["predicted_n"]), (&json!(0), &json!(9), &json!(n)));
    let of = |name: &str| timings[name].as_f64().unwrap_or(-1.0);
    for kind in ["prompt", "predicted"] {
        let [ms, each, rate] = ["ms", "per_token_ms", "per_second"].map(|what| of(&format!("{kind}_{what}")));
        assert!(ms >= 0.0 && (each * rate == 0.0 || (each * rate - 1e3).abs() < 1e-6), "{timings}");
    }
    assert_eq!((&reply["object"], &reply["model"]), (&json!("text_completion"), &json!("fake")));
    assert_eq!(reply["eldr"][0]["route"]["reason"], "load");

    let explained = world.get(&format!("/v1/eldr/explain?id={}", reply["id"].as_str().unwrap())).json();
    assert_eq!(explained["choices"][0]["route"], reply["eldr"][0]["route"]);
}

#[test]
fn a_stream_says_the_same_and_ends_with_its_usage() {
    let world = World::start();
    let (text, n, _) = says("Once upon", 5, 40);
    let body = json!({"prompt": "Once upon", "seed": 5, "max_tokens": 40, "stream": true,
        "stream_options": {"include_usage": true}});
    let reply = world.post("/v1/completions", &body);
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert_eq!(reply.streamed(0), text);
    let events = reply.events();
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(n)));
    assert_eq!(last["timings"]["predicted_n"], json!(n));
    assert_eq!(events[events.len() - 2]["timings"], last["timings"], "the end of the choice has them, too");
    let finishes: Vec<&Value> =
        events.iter().map(|event| &event["choices"][0]["finish_reason"]).filter(|reason| !reason.is_null()).collect();
    assert_eq!(finishes.len(), 1);
}

#[test]
fn a_stop_string_ends_the_text_and_no_part_of_it_is_seen() {
    let world = World::start();
    let (text, _, _) = says("stop here", 3, 60);
    let chars: Vec<char> = text.chars().collect();
    for (from, len) in [(5, 1), (10, 2), (17, 4), (30, 3)] {
        let stop: String = chars[from..from + len].iter().collect();
        let want = &text[..text.find(&stop).unwrap()];
        let body = json!({"prompt": "stop here", "seed": 3, "max_tokens": 60, "stop": [stop, "never there"]});
        let reply = world.post("/v1/completions", &body).json();
        assert_eq!(
            (&reply["choices"][0]["text"], &reply["choices"][0]["finish_reason"]),
            (&json!(want), &json!("stop"))
        );
        let mut body = body;
        body["stream"] = true.into();
        assert_eq!(world.post("/v1/completions", &body).streamed(0), want);
    }
    assert!(world.wait_idle());
}

// Symptom: an answer that a stop string ended had no usage.prompt_tokens_details.
#[test]
fn an_answer_that_a_stop_string_ends_says_what_was_cached() {
    let world = World::start();
    let (text, _, _) = says("stop here", 3, 60);
    let details = json!({"cached_tokens": 0});
    // The first token comes from prefill, the tenth from decode.
    for at in [0, 9] {
        let stop = text.chars().nth(at);
        let mut body = json!({"prompt": "stop here", "seed": 3, "max_tokens": 60, "stop": [stop]});
        let reply = world.post("/v1/completions", &body).json();
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
        assert_eq!(reply["usage"]["prompt_tokens_details"], details, "{reply}");
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let events = world.post("/v1/completions", &body).events();
        assert_eq!(events.last().unwrap()["usage"]["prompt_tokens_details"], details);
    }
}

#[test]
fn every_prompt_and_every_n_is_a_choice_with_a_seed_of_its_own() {
    let world = World::start();
    let body = json!({"prompt": ["one", "two"], "n": 2, "seed": 8, "max_tokens": 9});
    let reply = world.post("/v1/completions", &body).json();
    let want: Vec<(&str, u64)> = vec![("one", 8), ("one", 9), ("two", 8), ("two", 9)];
    let mut completion_tokens = 0;
    for (index, (prompt, seed)) in want.into_iter().enumerate() {
        let (text, n, _) = says(prompt, seed, 9);
        assert_eq!(
            (&reply["choices"][index]["index"], &reply["choices"][index]["text"]),
            (&json!(index), &json!(text))
        );
        completion_tokens += n;
    }
    assert_eq!(reply["usage"]["prompt_tokens"], 6);
    assert_eq!(reply["usage"]["completion_tokens"], completion_tokens);
    let mut body = body;
    body["stream"] = true.into();
    let reply = world.post("/v1/completions", &body);
    assert_eq!(reply.streamed(3), says("two", 9, 9).0);
    // Tokens instead of text.
    let reply = world.post("/v1/completions", &json!({"prompt": [112, 111, 102], "seed": 1, "max_tokens": 3})).json();
    assert_eq!(reply["choices"][0]["text"], says("one", 1, 3).0);
}

#[test]
fn a_chat_goes_through_the_template() {
    let world = World::start();
    let prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let (text, _, _) = says(prompt, 4, 30);
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "seed": 4, "max_tokens": 30});
    let reply = world.post("/v1/chat/completions", &body).json();
    assert_eq!(reply["error"], Value::Null);
    assert_eq!(reply["choices"][0]["message"], json!({"role": "assistant", "content": text}));
    assert_eq!(reply["object"], "chat.completion");
    body["stream"] = true.into();
    let reply = world.post("/v1/chat/completions", &body);
    assert_eq!(reply.streamed(0), text);
    assert_eq!(reply.events()[0]["choices"][0]["delta"]["role"], "assistant");
}

// Symptom: llama-server's `n_probs` and `timings_per_token` were taken, and neither probabilities nor times came.
#[test]
fn what_llama_servers_fields_ask_for_comes() {
    let world = World::start();
    let body = json!({"prompt": "Once", "seed": 5, "max_tokens": 3, "ignore_eos": true, "n_probs": 1});
    let reply = world.post("/v1/completions", &body).json();
    assert_eq!(reply["choices"][0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(3), "{reply}");
    let chat =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": true, "n_probs": 1});
    let reply = world.post("/v1/chat/completions", &chat).json();
    assert_eq!(reply["choices"][0]["logprobs"]["content"].as_array().map(Vec::len), Some(3), "{reply}");
    let mut body = json!({"prompt": "Once", "seed": 5, "max_tokens": 3, "ignore_eos": true, "stream": true});
    let timed = |body: &Value| {
        let events = world.post("/v1/completions", body).events();
        let parts = events.iter().filter(|event| event["choices"][0]["finish_reason"].is_null());
        parts.map(|event| event["timings"]["predicted_n"].as_u64()).collect::<Vec<_>>()
    };
    assert!(timed(&body).iter().all(Option::is_none));
    body["timings_per_token"] = true.into();
    let times = timed(&body);
    assert!(!times.is_empty() && times.iter().all(Option::is_some) && times.is_sorted(), "{times:?}");
}

#[test]
fn tokens_come_back_as_text() {
    let world = World::start();
    let tokens = world.post("/tokenize", &json!({"content": "h\u{e9}"})).json();
    assert_eq!(tokens, json!({"tokens": [105, 196, 170]}));
    let pieces = world.post("/tokenize", &json!({"content": "\u{e9}", "with_pieces": true})).json();
    assert_eq!(pieces["tokens"][0], json!({"id": 196, "piece": [195]}));
    assert_eq!(world.post("/detokenize", &tokens).json(), json!({"content": "h\u{e9}"}));
}

#[test]
fn the_server_says_what_it_is_doing() {
    let world = World::start();
    assert_eq!(world.get("/health").json(), json!({"status": "ok"}));
    assert_eq!(world.get("/ready").status, 200);
    assert_eq!(world.get("/v1/models").json()["data"][0]["id"], "fake");
    assert_eq!(world.get("/props").json()["total_slots"], 16);
    assert_eq!(world.get("/slots").json().as_array().unwrap().len(), 16);
    world.post("/v1/completions", &json!({"prompt": "x", "seed": 1, "max_tokens": 6}));
    let workers = world.get("/v1/eldr/workers").json();
    assert_eq!((workers["workers"].as_array().unwrap().len(), &workers["policy"]), (2, &json!("least_loaded")));
    assert_eq!(workers["recent"][0]["prompt_tokens"], 1);
    let explained = world.post("/v1/eldr/explain", &json!({"prompt": "where"})).json();
    assert_eq!(explained["choices"][0]["route"]["worker"], 0, "{explained}");
    assert_eq!(explained["policy_note"], Value::Null);
    assert_eq!(world.get("/props").json()["eldr"], json!({"policy": "least_loaded", "policy_note": null}));
    let metrics = world.get("/metrics").body;
    for name in [
        "eldr_requests_total{",
        "eldr_ttft_seconds_bucket{",
        "llamacpp:requests_processing ",
        "eldr_kv_used_ratio{",
        "eldr_route_seconds_count 2\n",
        "eldr_route_seconds_bucket{le=\"+Inf\"} 2\n",
        "eldr_handoff_seconds_count 2\n",
        "eldr_handoff_fallback_total{reason=\"not_run\"} 0\n",
        "eldr_cache_blocks_total{outcome=\"miss\"}",
    ] {
        assert!(metrics.contains(name), "{name} in {metrics}");
    }
    let open = Reply::read(world.send("GET", "/metrics", "", &[("Accept", "application/openmetrics-text")]));
    assert!(open.body.ends_with("# EOF\n"));
}

// Symptom: of a drained worker it was said that it is neither healthy nor lost, and not what it is.
#[test]
fn a_drained_worker_gets_nothing_until_it_is_resumed() {
    let world = World::start();
    let drained = world.post("/v1/eldr/workers/0/drain", &json!({})).json();
    let states =
        |reply: &Value, id: usize| ["healthy", "lost", "drained"].map(|name| reply["workers"][id][name].clone());
    assert_eq!(states(&drained, 0), [false, false, true].map(Value::from), "{drained}");
    assert_eq!(states(&drained, 1), [true, false, false].map(Value::from), "{drained}");
    for seed in 0..4 {
        let body = json!({"prompt": "x", "seed": seed, "max_tokens": 5, "ignore_eos": true, "eldr": {"explain": true}});
        assert_eq!(world.post("/v1/completions", &body).json()["eldr"][0]["worker"], 1);
    }
    let resumed = world.post("/v1/eldr/workers/0/resume", &json!({})).json();
    assert_eq!(states(&resumed, 0), [true, false, false].map(Value::from), "{resumed}");
    assert_eq!(world.post("/v1/eldr/workers/9/drain", &json!({})).status, 400);
    assert_eq!(world.post("/v1/eldr/workers/one/drain", &json!({})).status, 400);
    assert_eq!(world.get("/v1/eldr/workers/0/drain").status, 405);
}

#[test]
fn a_request_is_routed_by_the_policy_it_asks_for() {
    let world = World::start();
    let ask = |policy: &str| {
        let eldr = json!({"policy": policy, "explain": true});
        let body = json!({"prompt": "x", "seed": 1, "max_tokens": 5, "ignore_eos": true, "eldr": eldr});
        world.post("/v1/completions", &body)
    };
    let mut texts = Vec::new();
    for (policy, used, reason) in [
        ("round_robin", "round_robin", "turn"),
        ("random", "random", "draw"),
        ("auto", "least_loaded", "load"),
        ("least_loaded", "least_loaded", "load"),
    ] {
        let reply = ask(policy).json();
        assert_eq!((&reply["eldr"][0]["policy"], &reply["eldr"][0]["route"]["reason"]), (&json!(used), &json!(reason)));
        texts.push(reply["choices"][0]["text"].clone());
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "a policy changed a text: {texts:?}");
    let turns = [0; 4].map(|_| ask("round_robin").json()["eldr"][0]["worker"].clone());
    assert_eq!((&turns[0], &turns[1]), (&turns[2], &turns[3]));
    assert_ne!(turns[0], turns[1]);
    let refused = ask("locality_band");
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("eldr.policy")));
    let explained = world.post("/v1/eldr/explain", &json!({"prompt": "x", "eldr": {"policy": "round_robin"}})).json();
    assert_eq!(
        (&explained["choices"][0]["policy"], &explained["policy"]),
        (&json!("round_robin"), &json!("least_loaded"))
    );
    let metrics = world.get("/metrics").body;
    assert!(metrics.contains("eldr_requests_total{policy=\"random\""), "{metrics}");
}

#[test]
fn the_experts_of_prompts_and_batches_are_shown() {
    let world = World::start();
    let reply =
        world.post("/v1/completions", &json!({"prompt": "abc", "seed": 1, "max_tokens": 5, "ignore_eos": true}));
    let explained = world.get(&format!("/v1/eldr/explain?id={}", reply.json()["id"].as_str().unwrap())).json();
    let experts = &explained["choices"][0]["experts"];
    assert_eq!((&experts["tokens"], &experts["of"]), (&json!(3), &json!(MODEL.n_expert)), "{explained}");
    let layer = &experts["layers"][0];
    let shares: f64 = layer["top"].as_array().unwrap().iter().map(|pick| pick["share"].as_f64().unwrap()).sum();
    assert!((shares - f64::from(MODEL.n_expert_used)).abs() < 0.05, "every token picks two: {layer}");

    assert!(world.wait(|world| world.engine.residents().is_empty()), "a sequence that ended is still held");
    let heat = world.get("/v1/eldr/experts").json();
    assert_eq!(
        (heat["workers"].as_array().unwrap().len(), &heat["workers"][0]["n_sequences"]),
        (2, &json!(0)),
        "{heat}"
    );
}

#[test]
fn a_stream_that_waits_says_that_it_is_alive() {
    let config = ServerConfig { keep_alive: std::time::Duration::from_millis(20), ..ServerConfig::default() };
    let world = World::with(config, DispatchLimits::default(), ModelCard::default());
    let body = json!({"prompt": "x", "seed": 1, "max_tokens": 5, "stream": true}).to_string();
    let mut reader = BufReader::new(world.send("POST", "/v1/completions", &body, &[]));
    assert_eq!(Reply::head(&mut reader).status, 200);
    let mut lines = reader.lines().map_while(Result::ok);
    assert!(lines.any(|line| line == ": still alive"));
    world.gate.open();
    assert!(lines.any(|line| line == "data: [DONE]"));
}

#[test]
fn what_can_be_read_again_is_read_again() {
    let world = World::start();
    assert_eq!(world.post("/v1/eldr/reload", &json!({})).status, 409);
    assert_eq!(world.get("/v1/eldr/reload").status, 405);
}

#[test]
fn keys_keep_out_who_has_none() {
    let config = ServerConfig { api_keys: vec!["right".to_owned(), "also".to_owned()], ..ServerConfig::default() };
    let world = World::with(config, DispatchLimits::default(), ModelCard::default());
    let ask = |headers: &[(&str, &str)]| Reply::read(world.send("GET", "/v1/models", "", headers)).status;
    assert_eq!(ask(&[]), 401);
    assert_eq!(ask(&[("Authorization", "Bearer wrong")]), 401);
    assert_eq!(ask(&[("Authorization", "Bearer right")]), 200);
    assert_eq!(ask(&[("Authorization", "Bearer also")]), 200);
    assert_eq!(ask(&[("Authorization", "Bearer also"), ("Origin", "https://example.org")]), 403);
    assert_eq!(world.get("/health").status, 200);
    let refused = world.get("/metrics").json();
    assert_eq!(refused["error"]["code"], "invalid_api_key");
}

// Symptom: a key that is not ASCII was taken at the start and then let nobody in.
#[test]
fn a_key_that_is_not_ascii_opens() {
    let config = ServerConfig { api_keys: vec!["schl\u{fc}ssel".to_owned()], ..ServerConfig::default() };
    let world = World::with(config, DispatchLimits::default(), ModelCard::default());
    let ask = |key: &str| Reply::read(world.send("GET", "/v1/models", "", &[("Authorization", key)])).status;
    assert_eq!(ask("Bearer schl\u{fc}ssel"), 200);
    assert_eq!((ask("Bearer schl\u{f6}ssel"), ask("schl\u{fc}ssel")), (401, 401));
}

// Symptom in other servers: /health is dead while a prompt is processed (ik_llama.cpp#1210).
#[test]
fn the_control_plane_answers_while_every_worker_is_stuck_in_a_prompt() {
    let world = World::with(ServerConfig::default(), DispatchLimits::default(), ModelCard::default());
    let long = "x".repeat(N_CTX_SLOT as usize - 1);
    let waiting = world.send("POST", "/v1/completions", &json!({"prompt": long, "max_tokens": 1}).to_string(), &[]);
    assert!(world.wait(|world| world.engine.stats().n_active == 1));
    for path in ["/health", "/ready", "/metrics", "/v1/models", "/slots", "/props", "/v1/eldr/workers"] {
        assert_eq!(world.get(path).status, 200, "{path}");
    }
    assert_eq!(world.post("/tokenize", &json!({"content": "x"})).status, 200);
    world.gate.open();
    assert_eq!(Reply::read(waiting).status, 200);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let limits = DispatchLimits { max_queue: 1, max_prefill: 1, ..DispatchLimits::default() };
    let world = World::with(ServerConfig::default(), limits, ModelCard::default());
    let body = json!({"prompt": "x", "max_tokens": 2});
    let send = |n_active: usize| {
        let reply = world.send("POST", "/v1/completions", &body.to_string(), &[]);
        assert!(world.wait(|world| world.engine.stats().n_active == n_active));
        reply
    };
    // One after the other: the first is the one in prefill, and the second waits.
    let (first, second) = (send(1), send(2));
    let refused = world.post("/v1/completions", &body);
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    // A request for two answers, of which one would fit, is refused whole.
    drop(second);
    assert!(world.wait(|world| world.engine.stats().n_active == 1));
    let refused = world.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2, "n": 2}));
    assert_eq!(refused.status, 429);
    world.gate.open();
    assert_eq!(Reply::read(first).status, 200);
    assert!(world.wait_idle());
}

#[test]
fn a_request_that_waits_too_long_is_told() {
    let queue_timeout = Some(std::time::Duration::from_millis(30));
    let config = ServerConfig { queue_timeout, ..ServerConfig::default() };
    let world = World::with(config, DispatchLimits::default(), ModelCard::default());
    let mut body = json!({"prompt": "x", "max_tokens": 2});
    let reply = world.post("/v1/completions", &body);
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("queue_timeout")));
    assert!(reply.header("retry-after").is_some());
    body["stream"] = true.into();
    let events = world.post("/v1/completions", &body).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "queue_timeout");
    world.gate.open();
    assert!(world.wait_idle());
}

#[test]
fn a_client_that_leaves_frees_its_place() {
    let world = World::with(ServerConfig::default(), DispatchLimits::default(), ModelCard::default());
    let body = json!({"prompt": "x", "max_tokens": 400, "stream": true, "ignore_eos": true}).to_string();
    let waiting = world.send("POST", "/v1/completions", &body, &[]);
    let whole = json!({"prompt": "y", "max_tokens": 400, "ignore_eos": true}).to_string();
    let other = world.send("POST", "/v1/completions", &whole, &[]);
    assert!(world.wait(|world| world.engine.stats().n_active == 2));
    drop((waiting, other));
    // Both are cancelled while their prompts are still stuck; nothing is left once the worker goes on.
    let outcomes = |world: &World| -> Vec<Value> {
        let recent = world.get("/v1/eldr/workers").json()["recent"].take();
        recent.as_array().unwrap().iter().map(|entry| entry["outcome"].clone()).collect()
    };
    assert!(world.wait(|world| outcomes(world) == ["cancelled", "cancelled"]), "{:?}", outcomes(&world));
    world.gate.open();
    assert!(world.wait_idle());
    assert_eq!(world.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).status, 200);
}

#[test]
fn a_shutdown_lets_running_requests_end() {
    let mut world = World::with(ServerConfig::default(), DispatchLimits::default(), ModelCard::default());
    let body = json!({"prompt": "bye", "seed": 2, "max_tokens": 20, "stream": true}).to_string();
    let running = world.send("POST", "/v1/completions", &body, &[]);
    assert!(world.wait(|world| world.engine.stats().n_active == 1));
    world.stop();
    assert!(world.wait(|world| std::net::TcpStream::connect(world.address).is_err()));
    world.gate.open();
    assert_eq!(Reply::read(running).streamed(0), says("bye", 2, 20).0);
    assert_eq!(world.join(), Ended::Drained);
}

// Symptom: after "11 requests .. are cut short" the program said that every request is answered.
#[test]
fn a_shutdown_past_its_limit_ends_streams_with_an_error() {
    let drain_timeout = std::time::Duration::from_millis(50);
    let config = ServerConfig { drain_timeout, ..ServerConfig::default() };
    let mut world = World::with(config, DispatchLimits::default(), ModelCard::default());
    let body = json!({"prompt": "bye", "max_tokens": 20, "stream": true}).to_string();
    let mut reader = BufReader::new(world.send("POST", "/v1/completions", &body, &[]));
    assert_eq!(Reply::head(&mut reader).status, 200);
    world.stop();
    let mut lines = reader.lines().map_while(Result::ok).filter(|line| line.starts_with("data: "));
    let error: Value = serde_json::from_str(&lines.next().unwrap()["data: ".len()..]).unwrap();
    assert_eq!(error["error"]["code"], "shutting_down");
    world.gate.open();
    assert_eq!(world.join(), Ended::CutShort);
}
