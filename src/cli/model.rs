//! Which model file a verb works on.
//!
//! Never looks for models elsewhere than beside the program, in its source tree and in the working directory.

use std::{
    env,
    path::{Path, PathBuf},
};

use eldr::engine::{self, EngineConfig, LoadedModel};

use super::{args::ModelArgs, error::CliError, output::note};

/// The model shipped with the project, from the project's root.
const SHIPPED: &str = "examples/data/tiny-moe-64x4.gguf";

/// The model asked for, or the shipped one, which is said on standard error.
pub fn shipped_or(model: Option<&PathBuf>) -> Result<PathBuf, CliError> {
    if let Some(path) = model {
        return Ok(path.clone());
    }
    let path = shipped().ok_or_else(|| {
        CliError::usage(format!("no model given with -m, and the shipped one ({SHIPPED}) was not found"))
    })?;
    note(&format!("no -m given: using the shipped test model {}", path.display()));
    Ok(path)
}

impl ModelArgs {
    /// Makes remote devices known, then loads the model on the devices of the workers in `config`.
    pub fn load(&self, config: &EngineConfig) -> Result<(PathBuf, LoadedModel), CliError> {
        let path = shipped_or(self.model.as_ref())?;
        self.add_rpc(config)?;
        let loaded = LoadedModel::load(&path, config)?;
        Ok((path, loaded))
    }

    /// Makes the devices of the RPC servers asked for known.
    pub fn add_rpc(&self, config: &EngineConfig) -> Result<(), CliError> {
        for endpoint in &self.rpc {
            let names = engine::add_rpc(endpoint, config.rpc_deadline)?;
            log::info!("{endpoint} serves {}", names.join(", "));
        }
        Ok(())
    }
}

/// The shipped model: of the folders above the program, then of the tree it was built from, then of the working
/// directory.
pub fn shipped() -> Option<PathBuf> {
    let program = env::current_exe().and_then(|path| path.canonicalize()).ok();
    let above = program.iter().flat_map(|path| path.ancestors().skip(1).take(4)).map(Path::to_owned);
    let roots = above.chain([PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from(".")]);
    roots.flat_map(|root| [root.join(SHIPPED), root.join("share/eldr").join(SHIPPED)]).find(|path| path.is_file())
}
