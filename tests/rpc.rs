//! Several devices without a GPU: two RPC servers on loopback are two ggml devices with no host memory. Prefill on one
//! and decode on both gives the tap counts and the text of the CPU.
#![allow(clippy::unwrap_used)]

use std::{
    env,
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use eldr::{
    engine::{EngineConfig, FlashAttention, LoadedModel, StreamEvent, WorkerList, add_rpc, serve_rpc},
    types::{Request, SamplingParams, Token},
};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf");
const SERVE: &str = "ELDR_TEST_RPC_SERVE";

const PROMPTS: [&str; 6] = [
    "def area(width, height):\n    return",
    "Solve the equation: 3x + 5 = 20.",
    "The patient reports chest pain since",
    "This agreement is governed by the laws of",
    "Pour installer le paquet, ouvrez un terminal et",
    "Compute 17 * 23.",
];

/// Not a check: the body of the server processes, which are this program again.
#[test]
fn server_process() {
    if let Ok(endpoint) = env::var(SERVE) {
        panic!("the server on {endpoint} stopped: {:?}", serve_rpc(&endpoint, "cpu", 1));
    }
}

/// A server process; ends with the test.
struct Server(Child);

impl Server {
    fn start(endpoint: &str) -> Self {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "server_process", "--nocapture"])
            .env(SERVE, endpoint)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self(child);
        for _ in 0..600 {
            if TcpStream::connect(endpoint).is_ok() {
                return server;
            }
            sleep(Duration::from_millis(50));
        }
        panic!("no server on {endpoint}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_endpoint() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn config(prefill: &str, decode: &str) -> EngineConfig {
    EngineConfig {
        prefill: prefill.parse::<WorkerList>().unwrap(),
        decode: decode.parse::<WorkerList>().unwrap(),
        n_slots: 4,
        n_ctx_slot: 256,
        chunk: 32,
        n_threads: 1,
        exact: true,
        flash_attention: FlashAttention::Off,
        ..EngineConfig::default()
    }
}

/// Each prompt's text, the decode workers that were used, and the first prompt's expert counts.
fn serve(config: &EngineConfig) -> (Vec<Vec<Token>>, Vec<u32>, Vec<u32>) {
    let model = LoadedModel::load(Path::new(MODEL), config).unwrap();
    let engine = model.engine(config).unwrap();
    let request = |(index, text): (usize, &&str)| Request {
        prompt: engine.tokenize(&text.repeat(3)).unwrap(),
        max_tokens: 16,
        sampling: SamplingParams { temperature: 0.7, seed: index as u64, ignore_eos: true, ..Default::default() },
        domain: None,
        deadline: None,
    };
    let requests: Vec<Request> = PROMPTS.iter().enumerate().map(request).collect();
    let counts = model.capture(config, &requests[0].prompt).unwrap().unwrap();
    let counts = counts.layers().iter().flat_map(|&layer| counts.row(layer).unwrap().to_vec()).collect();
    let streams: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let (mut texts, mut workers) = (Vec::new(), Vec::new());
    for stream in streams {
        let mut tokens = Vec::new();
        for event in stream {
            match event {
                StreamEvent::Token { token, .. } => tokens.push(token),
                StreamEvent::Routed { decision, .. } => workers.push(decision.worker.0),
                StreamEvent::End { .. } => {}
                StreamEvent::Failed(error) => panic!("{error}"),
            }
        }
        texts.push(tokens);
    }
    workers.sort_unstable();
    workers.dedup();
    (texts, workers, counts)
}

#[test]
fn two_rpc_devices_give_the_text_and_the_counts_of_the_cpu() {
    let (texts, _, counts) = serve(&config("1@cpu", "1@cpu"));
    let endpoints = [free_endpoint(), free_endpoint()];
    let _servers: Vec<Server> = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    let names: Vec<String> = endpoints.iter().flat_map(|endpoint| add_rpc(endpoint).unwrap()).collect();
    assert_eq!(names.len(), 2);
    let [first, second] = [&names[0], &names[1]];
    let rpc = config(&format!("1@{first}"), &format!("1@{first},1@{second}"));
    let (rpc_texts, workers, rpc_counts) = serve(&rpc);
    assert_eq!(rpc_counts, counts, "tap counts");
    assert_eq!(rpc_texts, texts, "texts");
    assert_eq!(workers, [0, 1], "both decode workers are used");
}
