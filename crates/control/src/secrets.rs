//! Secrets of the control plane: API keys, the seed that signs attach tokens.
//!
//! The store holds only SHA-256 of a key. A key is 256 random bits, so a plain hash is enough and looking it up by its
//! hash compares nothing byte by byte. Nothing here may reach a log: the types that carry a secret hide it in `Debug`.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use space_api::Scope;
use space_core::KeyId;
use space_core::token::{TokenSigner, TokenVerifier};

use crate::ControlError;
use crate::files::{read_secret, write_secret};
use crate::store::{KeyRow, Store};

const ADMIN_KEY_FILE: &str = "admin.key";
const SEED_FILE: &str = "token.seed";
const KEY_PREFIX: &str = "sk-";

/// A fresh or known admin key. `secret` must never be logged.
#[derive(Clone)]
pub struct AdminKey {
    pub id: KeyId,
    pub secret: String,
}

impl std::fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdminKey").field("id", &self.id).finish_non_exhaustive()
    }
}

fn random() -> Result<[u8; 32], ControlError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|e| ControlError::Random(e.to_string()))?;
    Ok(bytes)
}

pub fn key_text(bits: &[u8; 32]) -> String {
    format!("{KEY_PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))
}

pub fn new_key() -> Result<String, ControlError> {
    Ok(key_text(&random()?))
}

pub fn sha256(text: &[u8]) -> String {
    hex(&Sha256::digest(text))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

/// Signs attach tokens; also makes API keys that a repeated request can be given again.
pub struct Seed([u8; 32]);

impl Seed {
    pub fn signer(&self) -> TokenSigner {
        TokenSigner::from_seed(&self.0)
    }

    /// The key for one idempotent request: the same request gets the same key, though no key is stored. Both the seed
    /// and the request's idempotency key (of which the store has a hash) are needed to make it again.
    pub fn derived_key(&self, key: &KeyId, idempotency_key: &str) -> String {
        let mut hash = Sha256::new();
        hash.update(b"space api key v1\0");
        hash.update(self.0);
        hash.update(Sha256::digest(key.as_str()));
        hash.update(Sha256::digest(idempotency_key));
        key_text(&hash.finalize().into())
    }
}

/// `<data>/token.seed`, made at first use.
pub fn load_seed(data_dir: &Path) -> Result<Seed, ControlError> {
    let path = data_dir.join(SEED_FILE);
    match read_secret(&path)? {
        Some(bytes) => match bytes.try_into() {
            Ok(seed) => Ok(Seed(seed)),
            Err(_) => Err(ControlError::BadSecret { path, why: "not 32 bytes" }),
        },
        None => {
            let seed = random()?;
            write_secret(&path, &seed)?;
            Ok(Seed(seed))
        }
    }
}

/// What a node needs to check attach tokens; makes the seed when there is none yet, so either side may start first.
pub fn token_verifier(data_dir: &Path) -> Result<TokenVerifier, ControlError> {
    Ok(load_seed(data_dir)?.signer().verifier())
}

/// The admin key of this machine's own command line: in `<data>/admin.key` (0600), its hash in the store. Made at first
/// start, and made anew when the file is gone or is not (or no longer) the secret of an admin key in the store.
///
/// The file is written first: a crash in between leaves a secret nobody knows the hash of, which the next start puts in.
pub async fn bootstrap_admin_key(store: &Store, data_dir: &Path) -> Result<AdminKey, ControlError> {
    let path = data_dir.join(ADMIN_KEY_FILE);
    let kept = read_secret(&path)?.and_then(|bytes| String::from_utf8(bytes).ok());
    let kept = kept.map(|text| text.trim().to_owned()).filter(|text| is_key(text));
    if let Some(secret) = &kept {
        match store.key_by_hash(&sha256(secret.as_bytes())).await? {
            Some(row) if row.scope == Scope::Admin => return Ok(AdminKey { id: row.id, secret: secret.clone() }),
            // A key of lesser rights in the admin's place: not ours.
            Some(_) => {}
            None if store.has_admin_key().await? => {
                tracing::warn!("the key in admin.key is not known to the store (revoked?): a new one is made");
            }
            None => return insert(store, secret.clone()).await,
        }
    }
    let secret = new_key()?;
    write_secret(&path, secret.as_bytes())?;
    insert(store, secret).await
}

async fn insert(store: &Store, secret: String) -> Result<AdminKey, ControlError> {
    let id = KeyId::new();
    store
        .insert_key(KeyRow {
            id: id.clone(),
            name: "admin".into(),
            scope: Scope::Admin,
            hash: sha256(secret.as_bytes()),
            created_at_ms: crate::clock::now_ms(),
            last_used_at_ms: None,
        })
        .await?;
    tracing::info!(key = %id, "made an admin key");
    Ok(AdminKey { id, secret })
}

/// Whether a text can be a key at all; anything else need not be looked up.
pub fn is_key(text: &str) -> bool {
    text.strip_prefix(KEY_PREFIX).is_some_and(|body| {
        body.len() == 43 && body.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    })
}
