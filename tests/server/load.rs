//! Many clients at once, slow ones and silent ones.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    net::TcpStream,
    thread,
};

use serde_json::json;

use super::world::{Reply, World, says};

#[test]
fn many_streams_at_once_are_all_whole() {
    let world = World::start();
    thread::scope(|scope| {
        for client in 0..128u64 {
            let world = &world;
            scope.spawn(move || {
                let prompt = format!("client {client}");
                let body = json!({"prompt": prompt, "seed": client, "max_tokens": 60, "stream": true});
                let reply = world.post("/v1/completions", &body);
                assert_eq!(reply.status, 200);
                assert_eq!(reply.streamed(0), says(&prompt, client, 60).0, "client {client}");
            });
        }
    });
    assert!(world.wait_idle());
    assert_eq!(world.get("/health").status, 200);
}

#[test]
fn a_slow_reader_holds_nobody_up() {
    let world = World::start();
    let body = json!({"prompt": "slow", "seed": 1, "max_tokens": 500, "stream": true, "ignore_eos": true}).to_string();
    let mut slow = BufReader::new(world.send("POST", "/v1/completions", &body, &[]));
    assert_eq!(Reply::head(&mut slow).status, 200);
    let mut line = String::new();
    slow.read_line(&mut line).unwrap();
    for client in 0..8 {
        let body = json!({"prompt": "quick", "seed": client, "max_tokens": 50});
        assert_eq!(world.post("/v1/completions", &body).json()["choices"][0]["text"], says("quick", client, 50).0);
    }
    let mut rest = String::new();
    slow.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"));
}

#[test]
fn those_who_say_nothing_keep_nobody_out() {
    let world = World::start();
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(world.address).unwrap()).collect();
    assert_eq!(world.get("/health").status, 200);
    assert_eq!(world.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 3})).status, 200);
    drop(silent);
}
