//! What a recording of requests holds, and its bytes on disk: the experts each prompt picked, block by block, and those
//! of every generated token.
//!
//! Never reads a file or runs a model. Picks follow from a request's tokens alone, not from its batch, so a trace
//! replays any policy exactly.
//!
//! # The trace file
//!
//! All numbers are little-endian. The file is 8 bytes of magic (`ELDRTRAC`), a `u32` of version (1), then frames
//! without anything between them: frame 0 is the header, frame i the i-th request. A file that ends inside a frame was
//! cut off there; everything before it is whole.
//!
//! | bytes of a frame | what |
//! | --- | --- |
//! | 4 | `u32` length n of the content |
//! | 4 | the first 4 bytes of SHA-256 over frame number (`u32`) and length (`u32`) |
//! | 8 | the first 8 bytes of SHA-256 over frame number (`u32`) and content |
//! | n | content |
//!
//! The header's content is a JSON object: `fingerprint`, `layers` (llama.cpp's number of each of the L MoE layers),
//! `n_layer` (all layers), `n_expert` (E), `n_expert_used` (k), `n_block` (prompt tokens a block), and how it was
//! recorded: `max_tokens`, `temperature`, `seed`, `chat`, `gates`.
//!
//! A request's content, where L' is the number of usable layers (those with `layers[i] + 1 != n_layer`) and B is the
//! number of blocks, `n_prompt / n_block` rounded up:
//!
//! | bytes | what |
//! | --- | --- |
//! | 4 x 5 | `u32`: bytes of the id, bytes of the domain plus 1 (0: no domain), `n_prompt`, decode steps S, non-zero counts Z |
//! | 8 | the first 8 bytes of SHA-256 over what was asked ([`PromptKey`]) |
//! | | id and domain in UTF-8 |
//! | (B L' E) / 8, rounded up | a bit for each prefill count, lowest bit first: 1 where it is not zero |
//! | Z | the counts that are not zero, `u8` |
//! | S L k x 1 or 2 | experts of the decode steps, best first: `u8` if E is at most 256, else `u16` |
//! | 2 L' E x 4 | with `gates` only: the gate's probabilities, then its logits, `f32`, summed over the prompt |
//!
//! Python reads it without any library:
//!
//! ```python
//! import hashlib, json, struct
//!
//! def frames(path):
//!     data = open(path, "rb").read()
//!     assert data[:12] == b"ELDRTRAC" + struct.pack("<I", 1)
//!     at, number = 12, 0
//!     while at < len(data):
//!         n, (check, content) = struct.unpack_from("<I", data, at)[0], (data[at + 8:at + 16], data[at + 16:])
//!         content = content[:n]
//!         assert hashlib.sha256(struct.pack("<I", number) + content).digest()[:8] == check, f"record {number}"
//!         yield content
//!         at, number = at + 16 + n, number + 1
//!
//! def requests(path):
//!     records = frames(path)
//!     h = json.loads(next(records))
//!     usable = sum(layer + 1 != h["n_layer"] for layer in h["layers"])
//!     for r in records:
//!         n_id, n_domain, n_prompt, steps, nonzero = struct.unpack_from("<5I", r)
//!         name, domain = r[28:28 + n_id].decode(), r[28 + n_id:28 + n_id + max(n_domain - 1, 0)].decode()
//!         at = 28 + n_id + max(n_domain - 1, 0)
//!         n = -(-n_prompt // h["n_block"]) * usable * h["n_expert"]
//!         values = iter(r[at + -(-n // 8):])
//!         counts = [next(values) if r[at + i // 8] >> i % 8 & 1 else 0 for i in range(n)]
//!         at += -(-n // 8) + nonzero
//!         width = len(h["layers"]) * h["n_expert_used"]
//!         picks = struct.unpack_from(f"<{steps * width}{'B' if h['n_expert'] <= 256 else 'H'}", r, at)
//!         yield name, domain if n_domain else None, counts, picks  # B x L' x E, S x L x k
//! ```

mod decode;
mod encode;
mod error;
mod frame;
mod prompt;
mod request;
mod settings;

pub use decode::{decode_header, decode_request};
pub use encode::{encode_header, encode_request};
pub use error::TraceError;
pub use frame::{FRAME_HEAD, FrameHead, PREAMBLE, check_preamble, frame, is_torn_preamble, preamble};
pub use prompt::PromptPicks;
pub use request::{GateSums, TraceRequest};
pub use settings::{PromptKey, RecordSettings};

use crate::types::MoeShape;

/// Recorded requests of one model.
///
/// ```
/// use eldr::{
///     trace::{
///         FRAME_HEAD, FrameHead, GateSums, PromptKey, PromptPicks, RecordSettings, Trace, TraceError, TraceHeader, TraceRequest,
///         decode_request, encode_request, frame,
///     },
///     types::MoeShape,
/// };
///
/// # fn main() -> Result<(), TraceError> {
/// let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 4, n_expert_used: 2 };
/// let header = TraceHeader { shape, fingerprint: "model".to_owned(), n_block: 32 };
///
/// // A prompt of two tokens, then one decode step: two picks in each of two layers. Layer 1, the last, shows in no prompt.
/// let mut prompt = PromptPicks::new(&header, 2, false);
/// prompt.add(0, &[0, 1, 1, 2], &[], &[]);
/// let (blocks, gates): (Vec<u8>, Option<GateSums>) = prompt.finish().expect("every token was seen");
/// let request =
///     TraceRequest { id: "a".to_owned(), domain: None, n_prompt: 2, blocks, picks: vec![0, 3, 1, 2], gates };
/// assert_eq!(request.prefill_counts(&header).row(0), Some(&[1, 2, 1, 0][..]));
/// assert_eq!(request.step_picks(&header, 0, 1), [1, 2]);
///
/// // As it lies in a file: frame 1, after the header's.
/// let settings = RecordSettings::default();
/// let key = PromptKey::new(&[7, 8], settings.max_tokens, None);
/// let bytes = frame(1, &encode_request(&header, settings.gates, 1, &request, key)?);
/// let (head, content) = bytes.split_first_chunk::<FRAME_HEAD>().expect("a head");
/// FrameHead::parse(1, head)?.verify(content)?;
/// assert_eq!(decode_request(&header, settings.gates, 1, content)?, (request.clone(), key));
///
/// let trace = Trace { header, requests: vec![request] };
/// assert_eq!(trace.requests[0].n_steps(&trace.header), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// What holds for all of them.
    pub header: TraceHeader,
    /// The requests, in order of recording.
    pub requests: Vec<TraceRequest>,
}

/// What holds for every request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceHeader {
    /// The model's MoE layers and experts.
    pub shape: MoeShape,
    /// Which model it is, as a calibration names it.
    pub fingerprint: String,
    /// Prompt tokens a block, 1 to 128; a prompt's last block may hold fewer.
    pub n_block: u32,
}

impl TraceHeader {
    /// Blocks of a prompt of `n_prompt` tokens.
    pub fn n_blocks(&self, n_prompt: u32) -> usize {
        n_prompt.div_ceil(self.n_block.max(1)) as usize
    }

    /// Tokens of block `block` of a prompt of `n_prompt` tokens.
    fn n_block_tokens(&self, n_prompt: u32, block: usize) -> u32 {
        (n_prompt - block as u32 * self.n_block).min(self.n_block)
    }

    /// Expert ids a decode step has: L x k.
    fn step_width(&self) -> usize {
        self.shape.n_layer_moe() * self.shape.n_expert_used as usize
    }

    /// Counts a block has: L' x E.
    fn block_width(&self) -> usize {
        self.shape.usable().len() * self.shape.n_expert as usize
    }
}
