// A recording with known structure, for the examples in the docs: requests of four domains in turn, each of which picks
// from a quarter of the experts.

use eldr::{
    rng::Rng,
    trace::{PromptPicks, Trace, TraceHeader, TraceRequest},
    types::MoeShape,
};

const N_EXPERT: usize = 32;
const N_PROMPT: usize = 24;

/// Two different experts a token of domain `domain`, in one layer.
fn pick(domain: usize, rng: &mut Rng) -> [u32; 2] {
    let own = N_EXPERT / 4;
    let (first, other) = (rng.below(own), rng.below(own - 1));
    [first, (first + 1 + other) % own].map(|expert| (domain * own + expert) as u32)
}

fn request(header: &TraceHeader, number: usize, rng: &mut Rng) -> TraceRequest {
    let domain = number % 4;
    let mut prompt = PromptPicks::new(header, N_PROMPT as u32, false);
    for layer in header.shape.usable() {
        let picks: Vec<u32> = (0..N_PROMPT).flat_map(|_| pick(domain, rng)).collect();
        prompt.add(layer, &picks, &[], &[]);
    }
    let n_steps = 20 + rng.below(20);
    let steps = (0..n_steps * header.shape.n_layer_moe()).flat_map(|_| pick(domain, rng));
    let picks = steps.map(|expert| expert as u16).collect();
    let (blocks, gates) = prompt.finish().expect("every layer saw every token");
    let domain = Some(["code", "math", "medical", "legal"][domain].to_owned());
    TraceRequest { id: number.to_string(), domain, n_prompt: N_PROMPT as u32, blocks, picks, gates }
}

/// `n_requests` requests of a model of four layers.
pub fn trace(n_requests: usize) -> Trace {
    let shape = MoeShape { layers: vec![0, 1, 2, 3], n_layer: 4, n_expert: N_EXPERT as u32, n_expert_used: 2 };
    let header = TraceHeader { shape, fingerprint: "planted".to_owned(), n_block: 32 };
    let mut rng = Rng::new(1);
    let requests = (0..n_requests).map(|number| request(&header, number, &mut rng)).collect();
    Trace { header, requests }
}
