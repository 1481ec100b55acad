//! Counts that any engine captured, as calibration input.
//!
//! Never opens a file: it reads the bytes of one.

use std::collections::HashMap;

use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use crate::{
    calibrate::{CalibrationInput, CountsError, checksum::hex},
    signature::ExpertCounts,
    types::{MoeShape, shown},
};

/// A file of counts: its tensors and metadata.
struct Captured<'a> {
    tensors: SafeTensors<'a>,
    entries: HashMap<String, String>,
}

impl<'a> Captured<'a> {
    fn open(bytes: &'a [u8]) -> Result<Self, CountsError> {
        let damaged = |error: safetensors::SafeTensorError| CountsError::Safetensors(error.to_string());
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(damaged)?;
        Ok(Self { tensors, entries: header.metadata().clone().unwrap_or_default() })
    }
}

/// Counts of N requests in L layers of E experts, row by row.
struct Cube {
    dim: [usize; 3],
    counts: Vec<u32>,
}

impl CalibrationInput {
    /// Reads counts from the bytes of a safetensors file.
    ///
    /// Tensors `prefill_counts` and `decode_counts`, u32 `[N, L, E]`: how many of a request's prompt tokens, and of its
    /// generated tokens, picked an expert of a layer. Every layer counts as usable, so the model is taken to have one
    /// more layer than L. Optional:
    ///
    /// - labels: metadata `labels`, a JSON list of N strings or nulls; or a tensor `labels` of N whole numbers (u8, i32,
    ///   u32, i64 or u64), which become their decimal texts. The metadata count if both are there.
    /// - names: metadata `ids`, a JSON list of N different strings; otherwise the requests are named 0, 1, 2, ..
    /// - metadata `model`: any text that tells models apart. The fingerprint is `counts-` and the first 16 digits of the
    ///   SHA-256 of `model`, L, E and k, each followed by a zero byte.
    /// - metadata `n_expert_used`: experts a token picks (k); 1 without it. Tokens are picks of a layer divided by k.
    pub fn of_counts(bytes: &[u8]) -> Result<Self, CountsError> {
        let Captured { tensors, entries } = Captured::open(bytes)?;
        let entry = |name: &str| entries.get(name).map(String::as_str);

        let prefill = cube(&tensors, "prefill_counts", BOTH)?;
        let decode = cube(&tensors, "decode_counts", BOTH)?;
        if prefill.dim != decode.dim {
            return Err(CountsError::Disagree { prefill: prefill.dim, decode: decode.dim });
        }
        let [n, l, e] = prefill.dim;
        let shape = shape(l, e, entry("n_expert_used"))?;
        let ids = ids(entry("ids"), n)?;
        for (phase, cube) in [("prefill", &prefill), ("decode", &decode)] {
            if let Some(at) = cube.counts.chunks_exact(l * e).position(|counts| counts.iter().all(|&c| c == 0)) {
                return Err(CountsError::NoPicks { id: ids[at].clone(), phase });
            }
        }
        let labels = match (entry("labels"), tensors.tensor("labels")) {
            (Some(text), _) => list::<Option<String>>("labels", text, n)?,
            (None, Ok(tensor)) => numbers(tensor.dtype(), tensor.shape(), tensor.data(), n)?,
            (None, Err(_)) => vec![None; n],
        };
        let k = shape.n_expert_used;
        let n_tokens = prefill.counts.chunks_exact(l * e).map(|counts| n_tokens(counts, e, k)).collect();
        let fingerprint = fingerprint(entry("model").unwrap_or_default(), [l, e, k as usize]);
        Ok(Self::of_parts(shape, fingerprint, ids, labels, n_tokens, [prefill.counts, decode.counts]))
    }
}

/// Prefill counts of requests to be routed.
///
/// ```
/// use eldr::calibrate::{CountsError, PrefillCounts};
/// use safetensors::{Dtype, tensor::{TensorView, serialize}};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // One request, one layer, three experts.
/// let counts: Vec<u8> = [4u32, 0, 2].iter().flat_map(|n| n.to_le_bytes()).collect();
/// let tensor = TensorView::new(Dtype::U32, vec![1, 1, 3], &counts)?;
/// let file = serialize([("prefill_counts", tensor)], None)?;
/// let read = PrefillCounts::read(&file)?;
/// assert_eq!((read.ids[0].as_str(), read.counts[0].row(0)), ("0", Some(&[4, 0, 2][..])));
///
/// let error: CountsError = PrefillCounts::read(b"no counts").unwrap_err();
/// assert!(!error.to_string().is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillCounts {
    /// The requests' names.
    pub ids: Vec<String>,
    /// Their counts in every layer, rows 0 to L - 1.
    pub counts: Vec<ExpertCounts>,
    /// Metadata `model`, if it is there.
    pub model: Option<String>,
    /// What a calibration made from counts with this `model` and shape is for.
    pub fingerprint: String,
}

impl PrefillCounts {
    /// Reads them from the bytes of a safetensors file as [`CalibrationInput::of_counts`] takes it; decode counts may be
    /// missing, and a request may have no picks.
    pub fn read(bytes: &[u8]) -> Result<Self, CountsError> {
        let Captured { tensors, entries } = Captured::open(bytes)?;
        let entry = |name: &str| entries.get(name).map(String::as_str);
        let prefill = cube(&tensors, "prefill_counts", "it is")?;
        let [n, l, e] = prefill.dim;
        let shape = shape(l, e, entry("n_expert_used"))?;
        let ids = ids(entry("ids"), n)?;
        let of_request = |counts: &[u32]| {
            let n_tokens = n_tokens(counts, e, shape.n_expert_used);
            ExpertCounts::from_rows(&shape.layers, shape.n_expert, n_tokens, counts.to_vec())
        };
        let model = entry("model").map(str::to_owned);
        let k = shape.n_expert_used as usize;
        let fingerprint = fingerprint(model.as_deref().unwrap_or_default(), [l, e, k]);
        Ok(Self { counts: prefill.counts.chunks_exact(l * e).map(of_request).collect(), ids, model, fingerprint })
    }
}

/// What a calibration needs.
const BOTH: &str = "`prefill_counts` and `decode_counts` are";

fn cube(tensors: &SafeTensors<'_>, name: &'static str, needed: &'static str) -> Result<Cube, CountsError> {
    let tensor = tensors.tensor(name).map_err(|_| CountsError::NoTensor { name, needed })?;
    let wrong = || CountsError::Shape { name, found: format!("{:?} {:?}", tensor.dtype(), tensor.shape()) };
    let dim: [usize; 3] = tensor.shape().try_into().map_err(|_| wrong())?;
    if tensor.dtype() != Dtype::U32 {
        return Err(wrong());
    }
    if dim.contains(&0) {
        return Err(CountsError::Empty { name, dim });
    }
    let words: &[[u8; 4]] = tensor.data().as_chunks().0;
    Ok(Cube { dim, counts: words.iter().map(|&word| u32::from_le_bytes(word)).collect() })
}

fn shape(l: usize, e: usize, n_expert_used: Option<&str>) -> Result<MoeShape, CountsError> {
    // Sizes of tensors that are in memory.
    let number = |size: usize| u32::try_from(size).map_err(|_| CountsError::TooLarge(size));
    let n_layer = number(l.saturating_add(1))?;
    let n_expert = number(e)?;
    let n_expert_used = match n_expert_used {
        Some(text) => text.parse().ok().filter(|k| (1..=n_expert).contains(k)).ok_or_else(|| {
            let want = format!("a whole number from 1 to {n_expert}");
            CountsError::Entry {
                name: "n_expert_used",
                problem: format!("is `{}`, but it must be {want}", shown(text)),
            }
        })?,
        None => 1,
    };
    Ok(MoeShape { layers: (0..n_layer - 1).collect(), n_layer, n_expert, n_expert_used })
}

/// The requests' names: as listed, or their numbers.
fn ids(listed: Option<&str>, n: usize) -> Result<Vec<String>, CountsError> {
    match listed {
        Some(text) => {
            let ids: Vec<String> = list("ids", text, n)?;
            let mut seen = HashMap::with_capacity(n);
            for (i, id) in ids.iter().enumerate() {
                if let Some(first) = seen.insert(id, i) {
                    let problem = format!("has {id:?} for requests {first} and {i}: give each a name of its own");
                    return Err(CountsError::Entry { name: "ids", problem });
                }
            }
            Ok(ids)
        }
        None => Ok((0..n).map(|i| i.to_string()).collect()),
    }
}

/// A JSON list of `n` entries.
fn list<T: serde::de::DeserializeOwned>(name: &'static str, text: &str, n: usize) -> Result<Vec<T>, CountsError> {
    let list: Vec<T> = serde_json::from_str(text).map_err(|error| CountsError::Entry {
        name,
        problem: format!("is not a JSON list of strings ({})", shown(&error.to_string())),
    })?;
    if list.len() != n {
        let problem = format!("has {} entries for {n} requests", list.len());
        return Err(CountsError::Entry { name, problem });
    }
    Ok(list)
}

fn numbers(dtype: Dtype, shape: &[usize], data: &[u8], n: usize) -> Result<Vec<Option<String>>, CountsError> {
    fn texts<const W: usize, T: ToString>(data: &[u8], number: fn([u8; W]) -> T) -> Vec<Option<String>> {
        data.as_chunks().0.iter().map(|&word| Some(number(word).to_string())).collect()
    }
    let labels = match dtype {
        Dtype::U8 => texts(data, u8::from_le_bytes),
        Dtype::I32 => texts(data, i32::from_le_bytes),
        Dtype::U32 => texts(data, u32::from_le_bytes),
        Dtype::I64 => texts(data, i64::from_le_bytes),
        Dtype::U64 => texts(data, u64::from_le_bytes),
        _ => Vec::new(),
    };
    if shape == [n] && labels.len() == n {
        Ok(labels)
    } else {
        Err(CountsError::Labels { found: format!("{dtype:?} {shape:?}"), n_requests: n })
    }
}

/// Of the layer with most picks, should one count fewer.
fn n_tokens(counts: &[u32], e: usize, k: u32) -> u32 {
    let picks = counts.chunks_exact(e).map(|row| row.iter().map(|&c| u64::from(c)).sum::<u64>()).max();
    u32::try_from(picks.unwrap_or_default() / u64::from(k)).unwrap_or(u32::MAX)
}

fn fingerprint(model: &str, numbers: [usize; 3]) -> String {
    let mut hash = Sha256::new();
    for text in [model.to_owned()].into_iter().chain(numbers.map(|number| number.to_string())) {
        hash.update(text);
        hash.update([0]);
    }
    format!("counts-{}", &hex(&hash.finalize())[..16])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::calibrate::{CalibrationParams, decode, encode, fit, planted::Planted};

    /// A safetensors file of these tensors and metadata.
    fn file(tensors: &[(&str, &str, &[usize], Vec<u8>)], metadata: serde_json::Value) -> Vec<u8> {
        let mut header = serde_json::Map::from_iter([("__metadata__".to_owned(), metadata)]);
        let mut data = Vec::new();
        for (name, dtype, shape, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            data.extend(bytes);
            header.insert((*name).to_owned(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        }
        let header = serde_json::Value::Object(header).to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
    }

    fn bytes_of(counts: &[u32]) -> Vec<u8> {
        counts.iter().flat_map(|count| count.to_le_bytes()).collect()
    }

    const DIM: [usize; 3] = [2, 1, 3];

    fn small(metadata: serde_json::Value) -> Vec<u8> {
        let tensors = [
            ("prefill_counts", "U32", &DIM[..], bytes_of(&[4, 0, 2, 0, 8, 0])),
            ("decode_counts", "U32", &DIM[..], bytes_of(&[1, 1, 0, 0, 2, 2])),
        ];
        file(&tensors, metadata)
    }

    fn refused(bytes: &[u8]) -> String {
        CalibrationInput::of_counts(bytes).expect_err("a bad file").to_string()
    }

    #[test]
    fn counts_are_read_as_they_stand() {
        let input = CalibrationInput::of_counts(&small(json!({}))).expect("a good file");
        assert_eq!((input.n_requests(), input.usable(), input.ids()), (2, &[0][..], &["0".to_owned(), "1".into()][..]));
        assert_eq!(input.prefill().iter().copied().collect::<Vec<_>>(), [4, 0, 2, 0, 8, 0]);
        assert_eq!(input.decode().iter().copied().collect::<Vec<_>>(), [1, 1, 0, 0, 2, 2]);
        assert_eq!((input.labels(), input.n_tokens()), (&[None, None][..], &[6, 8][..]));

        let metadata = json!({
            "labels": "[\"code\", null]", "ids": "[\"a\", \"b\"]", "model": "m", "n_expert_used": "2"
        });
        let named = CalibrationInput::of_counts(&small(metadata)).expect("a good file");
        assert_eq!((named.labels(), named.n_tokens()), (&[Some("code".to_owned()), None][..], &[3, 4][..]));
        assert_eq!(named.ids(), ["a", "b"]);
        assert!(named.fingerprint().starts_with("counts-") && named.fingerprint() != input.fingerprint());
        assert_eq!(named.shape(), &MoeShape { layers: vec![0], n_layer: 2, n_expert: 3, n_expert_used: 2 });
    }

    #[test]
    fn labels_may_be_a_tensor_of_whole_numbers() {
        let with = |dtype: &str, shape: &[usize], data: Vec<u8>| {
            let counts = ("prefill_counts", "U32", &DIM[..], bytes_of(&[1; 6]));
            file(
                &[counts.clone(), ("decode_counts", counts.1, counts.2, counts.3), ("labels", dtype, shape, data)],
                json!({}),
            )
        };
        let labels = |bytes: &[u8]| CalibrationInput::of_counts(bytes).expect("a good file").labels().to_vec();
        let text = |n: i64| Some(n.to_string());
        assert_eq!(labels(&with("U32", &[2], bytes_of(&[7, 0]))), [text(7), text(0)]);
        assert_eq!(labels(&with("U8", &[2], vec![3, 4])), [text(3), text(4)]);
        let wide = [-1i64, 5].iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(labels(&with("I64", &[2], wide)), [text(-1), text(5)]);
        for bad in [
            with("F32", &[2], bytes_of(&[0, 0])),
            with("U32", &[3], bytes_of(&[0; 3])),
            with("U32", &[1, 2], bytes_of(&[0; 2])),
        ] {
            assert!(
                refused(&bad).contains("`labels` is") && refused(&bad).contains("2 whole numbers"),
                "{}",
                refused(&bad)
            );
        }
    }

    #[test]
    fn bad_files_are_refused_in_words() {
        let good = small(json!({}));
        for cut in [0, 7, 40, good.len() - 1] {
            assert!(refused(&good[..cut]).contains("not a whole safetensors file"), "cut at {cut}");
        }
        let counts = || bytes_of(&[1; 6]);
        let two = |prefill: (&str, &[usize], Vec<u8>), decode: (&str, &[usize], Vec<u8>)| {
            let named = |name, (dtype, shape, data): (_, _, _)| (name, dtype, shape, data);
            refused(&file(&[named("prefill_counts", prefill), named("decode_counts", decode)], json!({})))
        };
        let good = || ("U32", &DIM[..], counts());
        assert!(
            refused(&file(&[("prefill_counts", "U32", &DIM, counts())], json!({})))
                .contains("no tensor `decode_counts`")
        );
        // Symptom: what routes was told to bring decode counts too, which it does not read.
        let lacking = file(&[("decode_counts", "U32", &DIM, counts())], json!({}));
        let error = PrefillCounts::read(&lacking).expect_err("a bad file").to_string();
        assert!(error.contains("no tensor `prefill_counts`") && !error.contains("decode"), "{error}");
        assert!(refused(&lacking).contains("`prefill_counts` and `decode_counts` are needed"), "{}", refused(&lacking));
        let twice = small(json!({ "ids": "[\"a\", \"a\"]" }));
        let error = PrefillCounts::read(&twice).expect_err("a bad file").to_string();
        assert!(error.contains("has \"a\" for requests 0 and 1"), "{error}");
        let error = two(good(), ("I32", &DIM, counts()));
        assert!(error.contains("`decode_counts` is I32 [2, 1, 3]") && error.contains("U32 [N, L, E]"), "{error}");
        let error = two(("U32", &[2, 3], counts()), good());
        assert!(error.contains("`prefill_counts` is U32 [2, 3]"), "{error}");
        let error = two(good(), ("U32", &[1, 2, 3], counts()));
        assert!(error.contains("[2, 1, 3]") && error.contains("[1, 2, 3]"), "{error}");
        let error = two(("U32", &[0, 1, 3], vec![]), good());
        assert!(error.contains("`prefill_counts` is empty"), "{error}");
        let error = two(good(), ("U32", &DIM, bytes_of(&[1, 0, 0, 0, 0, 0])));
        assert!(error.contains("request `1` has no decode picks"), "{error}");
        let error = two(("U32", &DIM, bytes_of(&[0; 6])), good());
        assert!(error.contains("request `0` has no prefill picks"), "{error}");
        for (name, text, wanted) in [
            ("labels", "code, math", "not a JSON list of strings"),
            ("labels", "[\"a\"]", "1 entries for 2 requests"),
            ("ids", "[\"a\", null]", "not a JSON list of strings"),
            // Symptom: two requests of one name were taken.
            ("ids", "[\"a\", \"a\"]", "has \"a\" for requests 0 and 1"),
            ("n_expert_used", "4", "from 1 to 3"),
            ("n_expert_used", "two", "from 1 to 3"),
        ] {
            let error = refused(&small(json!({ name: text })));
            assert!(error.contains(&format!("`{name}`")) && error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn the_fit_of_counts_is_the_fit_of_what_was_recorded() {
        // The planted model's last layer shows no prompts; here it is left out of both sides.
        let recorded = Planted::default().input();
        let (n, l, e) = recorded.prefill().dim();
        let prefill: Vec<u32> = recorded.prefill().iter().copied().collect();
        let decode_counts: Vec<u32> = recorded.decode().slice(ndarray::s![.., ..l, ..]).iter().copied().collect();
        let labels: Vec<_> = recorded.labels().to_vec();
        let metadata = json!({ "labels": json!(labels).to_string(), "n_expert_used": "2" });
        let tensors = [
            ("prefill_counts", "U32", &[n, l, e][..], bytes_of(&prefill)),
            ("decode_counts", "U32", &[n, l, e][..], bytes_of(&decode_counts)),
        ];
        let counts = CalibrationInput::of_counts(&file(&tensors, metadata)).expect("a good file");
        assert_eq!((counts.labels(), counts.n_tokens()), (recorded.labels(), recorded.n_tokens()));
        let (calibration, report) = fit(&counts, &CalibrationParams::new(4)).expect("a good input");
        assert_eq!(report.purity, Some(1.0));
        assert_eq!(calibration.idf.dim(), (l, e));
        assert_eq!(decode(&encode(&calibration)).as_ref(), Ok(&calibration));
        let (of_recorded, _) = fit(&recorded, &CalibrationParams::new(4)).expect("a good input");
        assert_eq!(of_recorded.idf.slice(ndarray::s![..l, ..]), calibration.idf);
    }
}
