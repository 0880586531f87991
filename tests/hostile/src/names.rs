//! Names that come from a command line, an API body or a registry, and the tokens of attach.

use space_core::id::InvalidId;
use space_core::name::{self, TemplateRef};
use space_core::size::parse_size;
use space_core::token::{Claims, TokenSigner};
use space_core::{CommandId, OperationId, RunNumber, SandboxId};
use space_image::reference::RegistryReference;
use space_image::source::{self, Source};
use space_image::token::{self, Challenge};

use crate::{Seed, seed};

fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) && !text.starts_with('.')
}

/// What is accepted reads the same when it is written out, and holds nothing that a path, an address or a header would
/// understand otherwise.
pub fn references(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(reference) = RegistryReference::parse(text) {
        check_reference(&reference);
    }
    if let Ok(Source::Registry(reference)) = source::parse(text) {
        check_reference(&reference);
    }
    if let Some(Challenge::Bearer { realm, service, scope }) = token::parse(text) {
        let parts = [Some(realm), service, scope];
        assert!(parts.iter().flatten().map(String::len).sum::<usize>() <= text.len());
    }
    let id = |id: Result<String, InvalidId>| assert!(id.is_err() || (id.as_deref() == Ok(text) && is_plain(text)));
    id(text.parse::<SandboxId>().map(String::from));
    id(text.parse::<CommandId>().map(String::from));
    id(text.parse::<OperationId>().map(String::from));
    if name::check_sandbox_name(text).is_ok() {
        assert!(is_plain(text) && text.len() <= 63 && text.parse::<SandboxId>().is_err());
    }
    match text.parse::<TemplateRef>() {
        Ok(TemplateRef::Tag { name, tag }) => {
            assert!(is_plain(&name) && is_plain(&tag), "{name:?} {tag:?}");
            let again = format!("{name}:{tag}").parse();
            assert_eq!(again, Ok(TemplateRef::Tag { name, tag }));
        }
        Ok(TemplateRef::Digest(digest)) => assert!(name::is_digest(&digest)),
        Err(error) => assert!(error.to_string().len() < 2000),
    }
    if let Ok(bytes) = parse_size(text) {
        assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
    }
}

fn check_reference(reference: &RegistryReference) {
    let again = RegistryReference::parse(&reference.to_string()).expect("its own text");
    assert_eq!(&again, reference);
    assert!(
        !reference.registry.contains(['/', '@', '?', '#', '%', '\\'])
            && !reference.registry.contains(char::is_whitespace)
    );
    assert!(reference.repository.split('/').all(is_plain), "{}", reference.repository);
    assert!(reference.tag.as_deref().is_none_or(is_plain));
    assert!(reference.digest.as_deref().is_none_or(name::is_digest));
}

pub fn reference_seeds() -> Vec<Seed> {
    let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
    [
        ("registry", "docker://localhost:5000/a/b-c:1.0".to_owned()),
        ("with_digest", format!("r.example/a/b:t@{digest}")),
        ("address", "[::1]:5000/x".to_owned()),
        ("debian", "debian:bookworm+git,curl".to_owned()),
        ("archive", "oci-archive:/a/b.tar#v1".to_owned()),
        ("bearer", r#"Bearer realm="https://a/t",service="s",scope="repository:x:pull,push""#.to_owned()),
        ("basic", "Basic realm=x".to_owned()),
        ("sandbox", "sbx-01h455vb4pex5vsknk084sn02q".to_owned()),
        ("tag", "seed:latest".to_owned()),
        ("digest", digest),
        ("size", "1.5GiB".to_owned()),
        ("size_large", "16777215T".to_owned()),
    ]
    .map(|(name, text)| seed(name, text))
    .into()
}

fn signer() -> TokenSigner {
    TokenSigner::from_seed(&[7; 32])
}

fn claims(expires: u64) -> Claims {
    let sandbox = "sbx-01h455vb4pex5vsknk084sn02q".parse().expect("an id");
    let command = "cmd-01h455vb4pex5vsknk084sn02q".parse().expect("an id");
    Claims { sandbox, run: RunNumber(3), command, expires }
}

/// No text passes but the one that was signed.
pub fn token(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(claims) = signer().verifier().verify(text, 1000) {
        assert!(claims.expires > 1000);
        assert_eq!(signer().sign(&claims), text, "a second text for one token");
    }
}

pub fn token_seeds() -> Vec<Seed> {
    let good = signer().sign(&claims(2000));
    let cut = good[..good.len() - 1].to_owned();
    vec![
        seed("good", good.clone()),
        seed("expired", signer().sign(&claims(1000))),
        seed("other", TokenSigner::from_seed(&[8; 32]).sign(&claims(2000))),
        seed("cut", cut),
        seed("two_signatures", format!("{good}.{}", good.rsplit('.').next().unwrap_or_default())),
    ]
}
