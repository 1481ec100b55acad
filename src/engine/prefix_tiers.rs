use std::{sync::Arc, time::Instant};

use crate::{
    engine::{DiskTier, RamTier, RestoreRates},
    schedule::{PrefixStore, StoredMatch, StoredPrefix},
    types::Token,
};

const DISK: u8 = 1;

/// Host memory and a disk as one store: what is stored goes to both, what is found comes from the faster one that has most.
///
/// ```
/// use eldr::{
///     engine::{DiskStats, DiskTier, PrefixTiers, RamTier, RestoreRates},
///     schedule::{PrefixStore, SeqState, StoredPrefix},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// // What keys and values depend on: files of another model are left alone.
/// let fingerprint = vec![("model".to_owned(), "a toy".to_owned())];
/// let disk = DiskTier::open(folder.path(), fingerprint, 1 << 20)?;
/// let ram = RamTier::new(1 << 20);
/// let mut tiers = PrefixTiers::new(Some(ram), Some(disk), RestoreRates::default()).expect("two tiers");
///
/// let state = SeqState { n_tokens: 3, bytes: vec![0; 96].into() };
/// tiers.put(StoredPrefix { tokens: vec![1, 2, 3], state, counts: None, whole: false });
/// let found = tiers.find(&[1, 2, 9], &[]).expect("it begins alike");
/// assert_eq!(tiers.load(&found).expect("it is there").tokens, [1, 2, 3]);
///
/// // The disk is written by a thread of its own.
/// let disk = tiers.disk().expect("there is one");
/// disk.flush();
/// let DiskStats { n_files, problem, .. } = disk.stats();
/// assert_eq!((n_files, problem), (1, None));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PrefixTiers {
    ram: Option<RamTier>,
    disk: Option<DiskTier>,
    rates: RestoreRates,
}

impl PrefixTiers {
    /// A store over these; none if there are none.
    pub fn new(ram: Option<RamTier>, disk: Option<DiskTier>, rates: RestoreRates) -> Option<Self> {
        (ram.is_some() || disk.is_some()).then_some(Self { ram, disk, rates })
    }

    /// Bytes in host memory now.
    pub fn ram_bytes(&self) -> u64 {
        self.ram.as_ref().map_or(0, RamTier::n_bytes)
    }

    /// The disk's part.
    pub fn disk(&self) -> Option<&DiskTier> {
        self.disk.as_ref()
    }
}

impl PrefixStore for PrefixTiers {
    fn find(&mut self, prompt: &[Token], layers: &[u32]) -> Option<StoredMatch> {
        let near = self.ram.as_mut().and_then(|ram| ram.find(prompt, layers));
        let far = self.disk.as_mut().and_then(|disk| disk.find(prompt, layers));
        let far = far.map(|found| StoredMatch { tier: DISK, ..found });
        match (near, far) {
            (Some(near), Some(far)) if far.n_common > near.n_common && self.is_faster(&far, far.n_common) => Some(far),
            (near, far) => near.or(far),
        }
    }

    fn is_faster(&self, found: &StoredMatch, n_saved: u32) -> bool {
        // Until the rates are known, the simplest guess: a token of a stored prefix moves much faster than it is computed.
        let guess = || n_saved.saturating_mul(16) >= found.n_tokens;
        self.rates.is_faster(found, found.tier == DISK, n_saved).unwrap_or_else(guess)
    }

    fn load(&mut self, found: &StoredMatch) -> Option<Arc<StoredPrefix>> {
        if found.tier != DISK {
            return self.ram.as_mut()?.load(found);
        }
        let began = Instant::now();
        let prefix = self.disk.as_mut()?.load(found)?;
        self.rates.read(found.n_bytes, began.elapsed());
        if let Some(ram) = &self.ram {
            ram.put_shared(Arc::clone(&prefix));
        }
        Some(prefix)
    }

    fn has(&self, tokens: &[Token], layers: &[u32]) -> bool {
        let near = self.ram.as_ref().is_none_or(|ram| ram.has(tokens, layers));
        near && self.disk.as_ref().is_none_or(|disk| disk.has(tokens, layers))
    }

    fn put(&mut self, prefix: StoredPrefix) {
        let prefix = Arc::new(prefix);
        if let Some(disk) = &self.disk {
            disk.put_shared(Arc::clone(&prefix));
        }
        if let Some(ram) = &self.ram {
            ram.put_shared(prefix);
        }
    }

    fn lasts(&self) -> bool {
        self.disk.is_some()
    }

    fn closing(&mut self) {
        self.disk.iter_mut().for_each(PrefixStore::closing);
    }
}
