//! What a calibration file holds, byte for byte.
//!
//! Never opens a file, and never returns a calibration it has not verified.

use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

use ndarray::{Array1, Array2, Dimension};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::{
    calibrate::{Calibration, FormatError, TauOrigin, checksum},
    types::MoeShape,
};

/// The version of the format this crate reads and writes.
pub const FORMAT_VERSION: &str = "2";

/// The bytes of a calibration file: safetensors, so that other languages can read it.
///
/// Tensors `idf` f32 `[L, E]`, `layers` u32 `[N*]`, `centroids` f32 `[K, N* times E]` and, where there is one,
/// `load_model` f32; everything else is in the metadata, as strings. `sha256` there is that of the whole file with its own
/// 64 digits taken for zeros. Equal calibrations have equal bytes.
pub fn encode(calibration: &Calibration) -> Vec<u8> {
    let c = calibration;
    // Sorted by name, where the safetensors crate writes metadata in the order of a hash map.
    let mut metadata: BTreeMap<&str, String> = BTreeMap::from([
        (checksum::ENTRY, checksum::UNSEALED.to_owned()),
        ("eldr_calibration", FORMAT_VERSION.to_owned()),
        ("fingerprint", c.fingerprint.clone()),
        ("moe_layers", joined(&c.shape.layers)),
        ("n_layer", c.shape.n_layer.to_string()),
        ("n_expert", c.shape.n_expert.to_string()),
        ("n_expert_used", c.shape.n_expert_used.to_string()),
        ("n_requests", c.n_requests.to_string()),
        ("n_tokens", c.n_tokens.to_string()),
        ("rho", c.rho.to_string()),
        ("tau", c.tau.to_string()),
        ("tau_origin", c.tau_origin.name().to_owned()),
        ("cost", c.cost.to_string()),
        ("seed", c.seed.to_string()),
    ]);
    metadata.extend(c.capacity.as_ref().map(|capacity| ("capacity", joined(capacity))));
    metadata.extend(c.verdict.as_ref().map(|verdict| ("verdict", verdict.clone())));
    let mut header = BTreeMap::from([("__metadata__", json!(metadata))]);
    let mut data = Vec::new();
    let mut tensor = |name, dtype: &str, shape: &[usize], bytes: &mut dyn Iterator<Item = [u8; 4]>| {
        let start = data.len();
        data.extend(bytes.flatten());
        header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] }));
    };
    tensor("idf", "F32", c.idf.shape(), &mut c.idf.iter().map(|x| x.to_le_bytes()));
    tensor("layers", "U32", &[c.layers.len()], &mut c.layers.iter().map(|x| x.to_le_bytes()));
    tensor("centroids", "F32", c.centroids.shape(), &mut c.centroids.iter().map(|x| x.to_le_bytes()));
    if let Some(model) = &c.load_model {
        tensor("load_model", "F32", &[model.len()], &mut model.iter().map(|x| x.to_le_bytes()));
    }
    let mut header = Value::from_iter(header).to_string().into_bytes();
    // The data starts at a multiple of 8.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.append(&mut header);
    file.append(&mut data);
    checksum::seal(&mut file);
    file
}

fn joined(numbers: &[u32]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn split(list: &str) -> Option<Vec<u32>> {
    list.split(',').map(|number| number.parse().ok()).collect()
}

/// The calibration in the bytes of a file, everything verified: version, checksum, shapes, ranges, finite numbers, unit centroids.
pub fn decode(bytes: &[u8]) -> Result<Calibration, FormatError> {
    let damaged = |e: safetensors::SafeTensorError| FormatError::Safetensors(e.to_string());
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(damaged)?;
    let metadata = Metadata(header.metadata().as_ref());
    let version = metadata.text("eldr_calibration")?;
    if version != FORMAT_VERSION {
        return Err(FormatError::Version { found: version.to_owned(), known: FORMAT_VERSION });
    }
    metadata.text(checksum::ENTRY)?;
    if !checksum::is_intact(bytes) {
        return Err(FormatError::Checksum);
    }

    let shape = metadata.shape()?;
    let (l, e) = (shape.n_layer_moe(), shape.n_expert as usize);
    let idf = matrix(&tensors, "idf", Some(l), e, &format!("[{l}, {e}]"))?;
    if let Some(((layer, expert), weight)) = idf.indexed_iter().find(|(_, w)| **w < 0.0) {
        return Err(content("idf", format!("is {weight} at [{layer}, {expert}], but no weight is below 0")));
    }
    let layers = mask(&tensors, &shape)?;
    let width = layers.len() * e;
    let centroids = matrix(&tensors, "centroids", None, width, &format!("[K, {width}] with K of at least 1"))?;
    check_unit(&centroids)?;
    let n_workers = centroids.nrows();
    let load_model = match tensors.tensor("load_model") {
        Ok(_) => Some(vector(&tensors, "load_model")?.to_vec()),
        Err(_) => None,
    };
    Ok(Calibration {
        shape,
        fingerprint: metadata.text("fingerprint")?.to_owned(),
        idf,
        layers,
        centroids,
        n_requests: metadata.number("n_requests", "a whole number", |_| true)?,
        n_tokens: metadata.number("n_tokens", "a whole number", |_| true)?,
        rho: metadata.number("rho", "a number from -1 to 1", |rho: &f64| (-1.0..=1.0).contains(rho))?,
        tau: metadata.number("tau", "a number from 0 to 2", |tau: &f32| (0.0..=2.0).contains(tau))?,
        cost: metadata.number("cost", "a finite number", |cost: &f64| cost.is_finite())?,
        seed: metadata.number("seed", "a whole number", |_| true)?,
        tau_origin: metadata.tau_origin()?,
        capacity: metadata.capacity(n_workers)?,
        load_model,
        verdict: metadata.verdict()?,
    })
}

/// The strings beside the tensors.
struct Metadata<'a>(Option<&'a HashMap<String, String>>);

impl<'a> Metadata<'a> {
    fn text(&self, name: &'static str) -> Result<&'a str, FormatError> {
        self.0.and_then(|m| m.get(name)).map(String::as_str).ok_or(FormatError::NoEntry(name))
    }

    fn number<T: FromStr>(
        &self,
        name: &'static str,
        want: &'static str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<T, FormatError> {
        let value = self.text(name)?;
        let bad = || FormatError::Value { name, value: value.to_owned(), want };
        value.parse().ok().filter(fits).ok_or_else(bad)
    }

    fn shape(&self) -> Result<MoeShape, FormatError> {
        let n_layer = self.number("n_layer", "a whole number above 0", |&n: &u32| n > 0)?;
        let n_expert = self.number("n_expert", "a whole number above 0", |&n: &u32| n > 0)?;
        let n_expert_used =
            self.number("n_expert_used", "from 1 to the number of experts", |&n: &u32| (1..=n_expert).contains(&n))?;
        let list = self.text("moe_layers")?;
        let layers = split(list);
        let fits = |layers: &Vec<u32>| ascending_below(layers, n_layer);
        let want = "ascending layer numbers of the model, with commas between";
        let bad = || FormatError::Value { name: "moe_layers", value: list.to_owned(), want };
        Ok(MoeShape { layers: layers.filter(fits).ok_or_else(bad)?, n_layer, n_expert, n_expert_used })
    }
}

impl Metadata<'_> {
    fn tau_origin(&self) -> Result<TauOrigin, FormatError> {
        let name = self.text("tau_origin")?;
        let want = "default, given or trace";
        let bad = || FormatError::Value { name: "tau_origin", value: name.to_owned(), want };
        TauOrigin::ALL.into_iter().find(|origin| origin.name() == name).ok_or_else(bad)
    }

    fn capacity(&self, n_workers: usize) -> Result<Option<Vec<u32>>, FormatError> {
        let Ok(list) = self.text("capacity") else { return Ok(None) };
        let fits = |capacity: &Vec<u32>| capacity.len() == n_workers && !capacity.contains(&0);
        let want = "whole numbers above 0, one a centroid, with commas between";
        let bad = || FormatError::Value { name: "capacity", value: list.to_owned(), want };
        split(list).filter(fits).map(Some).ok_or_else(bad)
    }

    fn verdict(&self) -> Result<Option<String>, FormatError> {
        let Ok(verdict) = self.text("verdict") else { return Ok(None) };
        match serde_json::from_str::<Value>(verdict) {
            Ok(Value::Object(_)) => Ok(Some(verdict.to_owned())),
            _ => Err(FormatError::Value { name: "verdict", value: verdict.to_owned(), want: "a JSON object" }),
        }
    }
}

fn ascending_below(numbers: &[u32], end: u32) -> bool {
    numbers.windows(2).all(|w| w[0] < w[1]) && numbers.last().is_some_and(|&last| last < end)
}

fn content(name: &'static str, problem: String) -> FormatError {
    FormatError::Content { name, problem }
}

/// The words of a tensor whose type and number of dimensions are as wanted; and its shape.
fn words<'a>(
    tensors: &SafeTensors<'a>,
    name: &'static str,
    dtype: Dtype,
    want: &str,
    fits: impl Fn(&[usize]) -> bool,
) -> Result<(&'a [[u8; 4]], Vec<usize>), FormatError> {
    let tensor = tensors.tensor(name).map_err(|_| FormatError::NoTensor(name))?;
    if tensor.dtype() != dtype || !fits(tensor.shape()) {
        let found = format!("{:?} {:?}", tensor.dtype(), tensor.shape());
        return Err(FormatError::Shape { name, found, want: format!("{dtype:?} {want}") });
    }
    Ok((tensor.data().as_chunks().0, tensor.shape().to_vec()))
}

fn matrix(
    tensors: &SafeTensors<'_>,
    name: &'static str,
    n_rows: Option<usize>,
    n_columns: usize,
    want: &str,
) -> Result<Array2<f32>, FormatError> {
    let fits = |shape: &[usize]| {
        shape.len() == 2 && shape[1] == n_columns && n_rows.map_or(shape[0] > 0, |n_rows| shape[0] == n_rows)
    };
    let (words, shape) = words(tensors, name, Dtype::F32, want, fits)?;
    let numbers = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
    finite(name, Array2::from_shape_vec((shape[0], shape[1]), numbers).expect("safetensors checked the size"))
}

fn vector(tensors: &SafeTensors<'_>, name: &'static str) -> Result<Array1<f32>, FormatError> {
    let (words, _) = words(tensors, name, Dtype::F32, "[n]", |shape| shape.len() == 1)?;
    finite(name, words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}

fn finite<D: Dimension>(
    name: &'static str,
    numbers: ndarray::Array<f32, D>,
) -> Result<ndarray::Array<f32, D>, FormatError> {
    match numbers.indexed_iter().find(|(_, x)| !x.is_finite()) {
        Some((place, x)) => Err(content(name, format!("is {x} at {place:?}, but every number must be finite"))),
        None => Ok(numbers),
    }
}

fn mask(tensors: &SafeTensors<'_>, shape: &MoeShape) -> Result<Vec<u32>, FormatError> {
    let fits = |dim: &[usize]| dim.len() == 1 && dim[0] > 0;
    let (words, _) = words(tensors, "layers", Dtype::U32, "[N] with N of at least 1", fits)?;
    let layers: Vec<u32> = words.iter().map(|&word| u32::from_le_bytes(word)).collect();
    let n_layers = shape.n_layer_moe() as u32;
    if !ascending_below(&layers, n_layers) {
        let problem = format!("is {layers:?}, but must name MoE layers from 0 to {} in ascending order", n_layers - 1);
        return Err(content("layers", problem));
    }
    let usable = shape.usable();
    if let Some(layer) = layers.iter().find(|layer| usable.binary_search(layer).is_err()) {
        let problem = format!("holds MoE layer {layer}, the model's last, which does not show a prompt's picks");
        return Err(content("layers", problem));
    }
    Ok(layers)
}

fn check_unit(centroids: &Array2<f32>) -> Result<(), FormatError> {
    for (row, centroid) in centroids.rows().into_iter().enumerate() {
        let length = centroid.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        if (length - 1.0).abs() > 1e-4 {
            return Err(content("centroids", format!("has length {length} in row {row}, but each must have length 1")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::calibrate::planted;

    fn words_of(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    /// A whole file with the header's text changed by `edit`.
    fn with_header(bytes: &[u8], edit: impl Fn(&str) -> String) -> Vec<u8> {
        let n = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let header = edit(std::str::from_utf8(&bytes[8..8 + n]).expect("text")).into_bytes();
        let mut file = [(header.len() as u64).to_le_bytes().as_slice(), &header, &bytes[8 + n..]].concat();
        checksum::seal(&mut file);
        file
    }

    fn refused(bytes: &[u8]) -> String {
        decode(bytes).expect_err("a bad file").to_string()
    }

    fn with_entry(name: &str, from: &str, to: &str) -> String {
        let (capacity, verdict) = (Some(vec![3, 2]), Some("{}".to_owned()));
        let bytes = encode(&Calibration { capacity, verdict, ..planted::calibration() });
        let (from, to) = (format!("\"{name}\":\"{from}\""), format!("\"{name}\":\"{to}\""));
        refused(&with_header(&bytes, |header| {
            assert!(header.contains(&from), "{header}");
            header.replace(&from, &to)
        }))
    }

    fn with(change: impl Fn(&mut Calibration)) -> String {
        let mut calibration = planted::calibration();
        change(&mut calibration);
        refused(&encode(&calibration))
    }

    #[test]
    fn what_is_encoded_is_decoded_to_the_bit() {
        let mut calibration = planted::calibration();
        calibration.rho = 0.1 + 0.2;
        calibration.cost = 1.0 / 3.0;
        calibration.tau = 0.1;
        calibration.seed = u64::MAX;
        calibration.fingerprint = "qwen3moe \"q\" \u{e9}".into();
        let verdict = || Some("{\"helps\":true,\"gain\":[0.1,\"\\\"sha256\\\":\\\"\"]}".to_owned());
        for (load_model, capacity, verdict, tau_origin) in [
            (None, None, None, TauOrigin::Default),
            (Some(vec![0.5, -1.0, 3.25]), Some(vec![2, 1]), None, TauOrigin::Given),
            (None, Some(vec![1, 1]), verdict(), TauOrigin::Trace),
        ] {
            (calibration.load_model, calibration.capacity) = (load_model, capacity);
            (calibration.verdict, calibration.tau_origin) = (verdict, tau_origin);
            let bytes = encode(&calibration);
            assert_eq!(decode(&bytes).as_ref(), Ok(&calibration));
            assert_eq!(bytes, encode(&calibration));
        }
    }

    #[test]
    fn the_file_is_safetensors_by_the_book() {
        let bytes = encode(&planted::calibration());
        let n = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        assert!(n.is_multiple_of(8) && bytes[8..].starts_with(b"{\"__metadata__\":{\"cost\":\"1.5\","));
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["centroids", "idf", "layers"]);
        assert_eq!(tensors.tensor("idf").expect("idf").shape(), [4, 4]);
        assert_eq!(tensors.tensor("layers").expect("layers").dtype(), Dtype::U32);
        assert_eq!(&tensors.tensor("centroids").expect("centroids").data()[..8], words_of(&[0.6, 0.0]));
    }

    #[test]
    fn other_and_damaged_files_are_refused_in_words() {
        let bytes = encode(&planted::calibration());
        for cut in [0, 7, 8, 100, bytes.len() - 1] {
            let error = refused(&bytes[..cut]);
            assert!(error.contains("not a whole safetensors file"), "cut at {cut}: {error}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(refused(&longer).contains("not a whole safetensors file"));
        assert!(refused(b"GGUF\x03\0\0\0 and so on").contains("not a whole safetensors file"));
        let damaged = |at: usize, bit: u8| {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            refused(&bytes)
        };
        for at in 0..bytes.len() {
            for bit in [0, 5] {
                damaged(at, bit);
            }
        }
        assert!(damaged(bytes.len() - 1, 0).contains("damaged (its bytes do not match their SHA-256)"));
        let foreign = with_header(&bytes, |header| header.replace("eldr_calibration", "other_tool_file_"));
        assert!(refused(&foreign).contains("not a calibration"), "{}", refused(&foreign));
    }

    #[test]
    fn metadata_out_of_range_is_refused_by_name() {
        let version = with_entry("eldr_calibration", "2", "1");
        assert!(version.contains("version 1,") && version.contains("reads version 2"), "{version}");
        for (name, from, to) in [
            ("tau", "0.1", "2.5"),
            ("tau", "0.1", "-0.1"),
            ("tau", "0.1", "NaN"),
            ("rho", "0.625", "1.5"),
            ("cost", "1.5", "inf"),
            ("seed", "1", "-1"),
            ("n_tokens", "1234", "many"),
            ("n_layer", "5", "0"),
            ("n_expert_used", "2", "5"),
            ("moe_layers", "1,2,3,4", "1,3,2,4"),
            ("moe_layers", "1,2,3,4", "1,2,3,9"),
            ("moe_layers", "1,2,3,4", ""),
            ("tau_origin", "default", "guess"),
            ("capacity", "3,2", "3"),
            ("capacity", "3,2", "3,0"),
            ("capacity", "3,2", "3,x"),
            ("verdict", "{}", "[]"),
            ("verdict", "{}", "yes"),
        ] {
            let error = with_entry(name, from, to);
            assert!(error.contains(&format!("`{name}` is `{to}`")), "{error}");
        }
        let without = with_header(&encode(&planted::calibration()), |h| h.replace("\"seed\"", "\"sead\""));
        assert!(refused(&without).contains("no `seed`"));
    }

    #[test]
    fn tensors_of_another_shape_are_refused_by_name() {
        let error = with(|c| c.idf = Array2::zeros((3, 4)));
        assert!(error.contains("`idf` is F32 [3, 4], but it must be F32 [4, 4]"), "{error}");
        let error = with(|c| c.centroids = Array2::zeros((2, 7)));
        assert!(error.contains("`centroids` is F32 [2, 7]") && error.contains("[K, 8]"), "{error}");
        let error = with(|c| c.centroids = Array2::zeros((0, 8)));
        assert!(error.contains("`centroids` is F32 [0, 8]"), "{error}");
        let error = with(|c| c.layers = vec![]);
        assert!(error.contains("`layers` is U32 [0]"), "{error}");
        let bytes = encode(&planted::calibration());
        let floats = with_header(&bytes, |header| header.replace("U32", "F32"));
        assert!(refused(&floats).contains("`layers` is F32 [2]"));
        let unnamed = with_header(&bytes, |header| header.replace("\"idf\"", "\"idg\""));
        assert!(refused(&unnamed).contains("no tensor `idf`"));
    }

    #[test]
    fn numbers_that_cannot_be_are_refused_with_their_place() {
        let error = with(|c| c.idf[[1, 2]] = f32::NAN);
        assert!(error.contains("`idf` is NaN at (1, 2)"), "{error}");
        let error = with(|c| c.idf[[0, 3]] = -1.0);
        assert!(error.contains("`idf` is -1 at [0, 3]"), "{error}");
        let error = with(|c| c.centroids[[1, 0]] = f32::INFINITY);
        assert!(error.contains("`centroids` is inf at (1, 0)"), "{error}");
        let error = with(|c| c.centroids[[0, 0]] = 0.7);
        assert!(error.contains("`centroids` has length 1.06") && error.contains("row 0"), "{error}");
        let error = with(|c| c.centroids.row_mut(1).fill(0.0));
        assert!(error.contains("has length 0 in row 1"), "{error}");
        let error = with(|c| c.load_model = Some(vec![f32::NAN]));
        assert!(error.contains("`load_model` is NaN"), "{error}");
        for layers in [vec![2, 0], vec![1, 1], vec![0, 4]] {
            let error = with(|c| c.layers = layers.clone());
            assert!(error.contains(&format!("`layers` is {layers:?}")), "{error}");
        }
        let error = with(|c| c.layers = vec![0, 3]);
        assert!(error.contains("holds MoE layer 3, the model's last"), "{error}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(place in 0usize..2000, byte: u8, cut in 0usize..2000) {
            let mut bytes = encode(&planted::calibration());
            let n = bytes.len();
            bytes[place % n] = byte;
            if let Ok(calibration) = decode(&bytes) {
                prop_assert_eq!(decode(&encode(&calibration)), Ok(calibration));
            }
            bytes.truncate(cut);
            let _ = decode(&bytes);
        }
    }
}
