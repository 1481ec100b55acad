//! Several devices without a GPU: two RPC servers on loopback are two ggml devices with no host memory. Prefill on one
//! and decode on both gives the tap counts and the text of the CPU.
#![allow(clippy::unwrap_used)]

#[path = "rpc/split.rs"]
mod split;

use std::{
    env, fs,
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread::sleep,
    time::Duration,
};

use eldr::{
    engine::{
        Engine, EngineConfig, FlashAttention, LoadedModel, StreamEvent, TokenStream, WorkerList, add_rpc, serve_rpc,
    },
    route::PolicyKind,
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

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([format!("-{name}"), self.0.id().to_string()]).status().unwrap();
        assert!(status.success(), "kill -{name}");
        // Symptom: a server that was started at once found its predecessor's socket still open, and ended.
        while name == "KILL" && !self.is_gone() {
            sleep(Duration::from_millis(5));
        }
    }

    /// It has ended, and its sockets with it; the test has not been told yet.
    fn is_gone(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id()));
        stat.map_or(true, |stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
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
        // Every worker is used, however fast one or the other is.
        policy: PolicyKind::RoundRobin,
        flash_attention: FlashAttention::Off,
        ..EngineConfig::default()
    }
}

/// A request for each prompt, `n` times over with other seeds.
fn requests(engine: &Engine, n: usize, max_tokens: u32) -> Vec<Request> {
    let request = |(index, text): (usize, &&str)| Request {
        prompt: engine.tokenize(&text.repeat(3)).unwrap(),
        max_tokens,
        sampling: SamplingParams { temperature: 0.7, seed: index as u64, ignore_eos: true, ..Default::default() },
        domain: None,
        deadline: None,
    };
    PROMPTS.iter().cycle().take(n * PROMPTS.len()).enumerate().map(request).collect()
}

/// What a run of requests side by side gave.
struct Outcome {
    texts: Vec<Vec<Token>>,
    /// The decode workers that were used.
    workers: Vec<u32>,
}

impl Outcome {
    /// Every text is whole and the undisturbed one, whether its request was moved or not.
    #[track_caller]
    fn is_as(&self, undisturbed: &[Vec<Token>], what: &str) {
        for (index, (text, want)) in self.texts.iter().zip(undisturbed).enumerate() {
            assert_eq!(text, want, "{what}: request {index}");
        }
    }
}

/// Runs requests side by side; `meanwhile` happens once so many tokens have come.
fn run(engine: &Engine, requests: Vec<Request>, after: usize, meanwhile: impl FnOnce()) -> Outcome {
    let streams: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let n_seen = AtomicUsize::new(0);
    let read = |stream: TokenStream| {
        let (mut tokens, mut workers) = (Vec::new(), Vec::new());
        for event in stream {
            match event {
                StreamEvent::Token { token, .. } => {
                    tokens.push(token);
                    n_seen.fetch_add(1, SeqCst);
                }
                StreamEvent::Routed { decision, .. } => workers.push(decision.worker.0),
                StreamEvent::End { .. } => {}
                StreamEvent::Failed(error) => panic!("{error}"),
            }
        }
        (tokens, workers)
    };
    let read = &read;
    std::thread::scope(|scope| {
        let readers: Vec<_> = streams.into_iter().map(|stream| scope.spawn(move || read(stream))).collect();
        while n_seen.load(SeqCst) < after {
            sleep(Duration::from_millis(2));
        }
        meanwhile();
        let (texts, routes): (Vec<_>, Vec<_>) = readers.into_iter().map(|reader| reader.join().unwrap()).unzip();
        let mut workers = routes.concat();
        workers.sort_unstable();
        workers.dedup();
        Outcome { texts, workers }
    })
}

/// Each prompt's text, the decode workers that were used, and the first prompt's expert counts.
fn serve(config: &EngineConfig) -> (Vec<Vec<Token>>, Vec<u32>, Vec<u32>) {
    let model = LoadedModel::load(Path::new(MODEL), config).unwrap();
    let engine = model.engine(config).unwrap();
    let requests = requests(&engine, 1, 16);
    let counts = model.capture(config, &requests[0].prompt).unwrap().unwrap();
    let counts = counts.layers().iter().flat_map(|&layer| counts.row(layer).unwrap().to_vec()).collect();
    let Outcome { texts, workers, .. } = run(&engine, requests, 0, || {});
    (texts, workers, counts)
}

/// Waits until no decode worker is lost, or one is.
fn await_lost(engine: &Engine, lost: bool) {
    let what = if lost { "a loss" } else { "all to be well" };
    wait_for(engine, what, |now| now.iter().any(|&is| is) == lost);
}

/// Waits until these decode workers are lost, and no others.
fn await_all(engine: &Engine, lost: &[bool]) {
    wait_for(engine, &format!("{lost:?}"), |now| now == lost);
}

/// At most two minutes.
fn wait_for(engine: &Engine, what: &str, so: impl Fn(&[bool]) -> bool) {
    for _ in 0..1200 {
        if so(&engine.stats().lost) {
            return;
        }
        sleep(Duration::from_millis(100));
    }
    panic!("{:?} are lost: waited in vain for {what}", engine.stats().lost);
}

#[test]
fn two_rpc_devices_give_the_text_and_the_counts_of_the_cpu() {
    let (texts, _, counts) = serve(&config("1@cpu", "1@cpu"));
    let endpoints = [free_endpoint(), free_endpoint()];
    let _servers: Vec<Server> = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    let names: Vec<String> =
        endpoints.iter().flat_map(|endpoint| add_rpc(endpoint, Duration::from_secs(30)).unwrap()).collect();
    assert_eq!(names.len(), 2);
    let [first, second] = [&names[0], &names[1]];
    let rpc = config(&format!("1@{first}"), &format!("1@{first},1@{second}"));
    let (rpc_texts, workers, rpc_counts) = serve(&rpc);
    assert_eq!(rpc_counts, counts, "tap counts");
    assert_eq!(rpc_texts, texts, "texts");
    assert_eq!(workers, [0, 1], "both decode workers are used");
}

// Symptom: ggml's client ended the process when a server closed its connection, and waited for ever for one that hung.
#[test]
fn a_server_that_dies_hangs_or_restarts_costs_its_worker_only_and_no_request() {
    let endpoints = [free_endpoint(), free_endpoint()];
    let [first, second] = &endpoints;
    let mut config = config("1@cpu", &format!("1@rpc:{first},1@rpc:{second}"));
    // Long enough for a machine that is busy with something else.
    config.rpc_deadline = Duration::from_secs(5);
    let mut servers: Vec<Server> = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    let engine = Engine::open(Path::new(MODEL), &config).unwrap();
    let requests = requests(&engine, 3, 24);
    let early = requests.len() * 24 / 4;
    let Outcome { texts: undisturbed, workers, .. } = run(&engine, requests.clone(), 0, || {});
    assert_eq!(workers, [0, 1], "both decode workers are used");

    // All the requests may have been answered before the server was killed: then it is done once more.
    for _ in 0..5 {
        let killed = run(&engine, requests.clone(), early, || servers[0].signal("KILL"));
        killed.is_as(&undisturbed, "one server killed");
        await_lost(&engine, true);
        servers[0] = Server::start(first);
        await_lost(&engine, false);
        if engine.stats().n_given_back.worker_lost > 0 {
            break;
        }
    }
    assert!(engine.stats().n_given_back.worker_lost > 0, "the lost worker had requests");
    until_both_serve(&engine, &requests, &undisturbed);

    let stopped = run(&engine, requests.clone(), early, || servers[1].signal("STOP"));
    stopped.is_as(&undisturbed, "one server stopped");
    await_lost(&engine, true);
    servers[1].signal("CONT");
    await_lost(&engine, false);
    until_both_serve(&engine, &requests, &undisturbed);
    assert!(engine.stats().dispatch.n_workers_lost >= 2);
}

/// Runs the requests until both workers have some; on a machine that stalls, one may be lost once more meanwhile.
fn until_both_serve(engine: &Engine, requests: &[Request], undisturbed: &[Vec<Token>]) {
    for _ in 0..10 {
        let outcome = run(engine, requests.to_vec(), 0, || {});
        outcome.is_as(undisturbed, "a worker is back");
        if outcome.workers == [0, 1] {
            return;
        }
        await_lost(engine, false);
    }
    panic!("a worker that is back gets no requests");
}

#[test]
fn four_servers_two_of_which_fail_while_idle_or_at_once() {
    let endpoints: Vec<String> = (0..4).map(|_| free_endpoint()).collect();
    let place = |endpoint: &String| format!("1@rpc:{endpoint}");
    let mut config = config(&place(&endpoints[0]), &endpoints[1..].iter().map(place).collect::<Vec<_>>().join(","));
    // Long enough for a machine that is busy with something else.
    config.rpc_deadline = Duration::from_secs(5);
    let mut servers: Vec<Server> = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    let engine = Engine::open(Path::new(MODEL), &config).unwrap();
    let requests = requests(&engine, 2, 16);
    let undisturbed = run(&engine, requests.clone(), 0, || {}).texts;

    // Nobody computes: the watch alone finds out.
    servers[1].signal("KILL");
    servers[2].signal("STOP");
    await_all(&engine, &[true, true, false]);
    let outcome = run(&engine, requests.clone(), 0, || {});
    assert_eq!((outcome.texts, outcome.workers), (undisturbed.clone(), vec![2]));

    // The only prefill worker: requests wait for it.
    let outcome = run(&engine, requests, 5, || {
        servers[0].signal("KILL");
        sleep(Duration::from_millis(500));
        servers[0] = Server::start(&endpoints[0]);
    });
    outcome.is_as(&undisturbed, "the only prefill worker lost and back");
}

#[test]
fn four_servers_under_load_one_killed_one_stopped_one_restarted() {
    let endpoints: Vec<String> = (0..4).map(|_| free_endpoint()).collect();
    let decode: Vec<String> = endpoints.iter().map(|endpoint| format!("1@rpc:{endpoint}")).collect();
    let mut config = config("1@cpu", &decode.join(","));
    // Long enough for a machine that is busy with something else.
    config.rpc_deadline = Duration::from_secs(5);
    let mut servers: Vec<Server> = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    let engine = Engine::open(Path::new(MODEL), &config).unwrap();
    let requests = requests(&engine, 3, 16);
    let undisturbed = run(&engine, requests.clone(), 0, || {});
    assert_eq!(undisturbed.workers, [0, 1, 2, 3], "every worker is used");

    let disturbed = run(&engine, requests.clone(), 16, || {
        servers[0].signal("KILL");
        servers[1].signal("STOP");
        servers[2].signal("KILL");
        servers[2] = Server::start(&endpoints[2]);
    });
    disturbed.is_as(&undisturbed.texts, "one killed, one stopped, one restarted");
    await_all(&engine, &[true, true, false, false]);
    assert!(engine.stats().dispatch.n_workers_lost >= 3);

    servers[0] = Server::start(&endpoints[0]);
    servers[1].signal("CONT");
    await_all(&engine, &[false; 4]);
    run(&engine, requests, 0, || {}).is_as(&undisturbed.texts, "all are back");
}

#[test]
fn experts_in_host_memory_give_the_same_text() {
    let endpoints = [free_endpoint(), free_endpoint()];
    let _servers: Vec<Server> = endpoints.iter().map(|endpoint| Server::start(endpoint)).collect();
    let [first, second] = &endpoints;
    let (texts, _, counts) = serve(&config(&format!("1@rpc:{first}"), &format!("1@rpc:{second}")));
    for (prefill, decode) in [("cpu-moe", "n-cpu-moe=3"), ("n-cpu-moe=2", "cpu-moe")] {
        let host = config(&format!("1@rpc:{first}[{prefill}]"), &format!("1@rpc:{second}[{decode}]"));
        let (host_texts, _, host_counts) = serve(&host);
        assert_eq!((host_texts, host_counts), (texts.clone(), counts.clone()), "{prefill}, {decode}");
    }
}
