//! Attach tokens: what the control plane signs and a node checks, so that a node needs no secret and no look-up.
//!
//! A token is `st1.<payload>.<signature>`, both base64url without padding; the payload is JSON, the signature Ed25519
//! over `st1.<payload>`. It names one command of one run and expires. A token must never be logged.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};

use crate::id::{CommandId, RunNumber, SandboxId};

const PREFIX: &str = "st1";
const TOKEN_MAX_BYTES: usize = 2048;

/// What the bearer may do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    pub sandbox: SandboxId,
    pub run: RunNumber,
    pub command: CommandId,
    /// Seconds since 1970.
    pub expires: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("not an attach token")]
    Malformed,
    #[error("the token was not signed by this control plane")]
    BadSignature,
    #[error("the token has expired; ask for a new one with POST /v1/sandboxes/ID/commands/COMMAND/attach")]
    Expired,
}

/// The control plane's half.
pub struct TokenSigner(SigningKey);

/// A node's half.
#[derive(Clone)]
pub struct TokenVerifier(VerifyingKey);

impl TokenSigner {
    /// `seed` is 32 secret random bytes.
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        Self(SigningKey::from_bytes(seed))
    }

    pub fn verifier(&self) -> TokenVerifier {
        TokenVerifier(self.0.verifying_key())
    }

    pub fn sign(&self, claims: &Claims) -> String {
        let json = serde_json::to_vec(claims).expect("claims are plain data");
        let signed = format!("{PREFIX}.{}", URL_SAFE_NO_PAD.encode(json));
        let signature = self.0.sign(signed.as_bytes());
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.to_bytes()))
    }
}

impl TokenVerifier {
    /// The public key, which is no secret.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// `None` when these are not the bytes of a key.
    pub fn from_bytes(bytes: &[u8; 32]) -> Option<Self> {
        VerifyingKey::from_bytes(bytes).ok().map(Self)
    }

    /// `now` in seconds since 1970. Whether the node holds that run is the node's question, not ours.
    pub fn verify(&self, token: &str, now: u64) -> Result<Claims, TokenError> {
        if token.len() > TOKEN_MAX_BYTES {
            return Err(TokenError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let payload = signed.strip_prefix("st1.").ok_or(TokenError::Malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenError::Malformed)?;
        let signature = Signature::from_slice(&signature).map_err(|_| TokenError::Malformed)?;
        self.0.verify_strict(signed.as_bytes(), &signature).map_err(|_| TokenError::BadSignature)?;
        let json = URL_SAFE_NO_PAD.decode(payload).map_err(|_| TokenError::Malformed)?;
        let claims: Claims = serde_json::from_slice(&json).map_err(|_| TokenError::Malformed)?;
        if claims.expires <= now { Err(TokenError::Expired) } else { Ok(claims) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> Claims {
        Claims { sandbox: SandboxId::new(), run: RunNumber(3), command: CommandId::new(), expires: 1000 }
    }

    #[test]
    fn a_token_works_until_it_expires_and_only_for_its_signer() {
        let signer = TokenSigner::from_seed(&[7; 32]);
        let token = signer.sign(&claims());
        assert!(signer.verifier().verify(&token, 999).is_ok());
        assert_eq!(signer.verifier().verify(&token, 1000), Err(TokenError::Expired));
        let other = TokenSigner::from_seed(&[8; 32]);
        assert_eq!(other.verifier().verify(&token, 0), Err(TokenError::BadSignature));
    }

    proptest::proptest! {
        #[test]
        fn a_changed_token_never_passes(at in 0usize..200, with in proptest::char::range('!', '~')) {
            let signer = TokenSigner::from_seed(&[7; 32]);
            let token = signer.sign(&claims());
            let mut chars: Vec<char> = token.chars().collect();
            let at = at % chars.len();
            proptest::prop_assume!(chars[at] != with);
            chars[at] = with;
            let changed: String = chars.into_iter().collect();
            proptest::prop_assert!(signer.verifier().verify(&changed, 0).is_err());
        }

        #[test]
        fn garbage_is_refused(text in ".{0,300}") {
            let signer = TokenSigner::from_seed(&[7; 32]);
            proptest::prop_assert!(signer.verifier().verify(&text, 0).is_err());
        }
    }
}
