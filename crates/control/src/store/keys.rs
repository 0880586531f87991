//! API keys: never the secret, only its hash.

use space_api::Scope;
use space_core::KeyId;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};

use super::{IdempotencyKey, Store, StoreError, idempotency};

#[derive(Clone, Debug)]
pub struct KeyRow {
    pub id: KeyId,
    pub name: String,
    pub scope: Scope,
    /// SHA-256 of the secret, hex.
    pub hash: String,
    pub created_at_ms: i64,
    pub last_used_at_ms: Option<i64>,
}

fn word(scope: Scope) -> &'static str {
    match scope {
        Scope::Admin => "admin",
        Scope::Use => "use",
        Scope::Read => "read",
    }
}

fn parse(row: &SqliteRow) -> Result<KeyRow, StoreError> {
    let scope = match row.try_get::<&str, _>("scope")? {
        "admin" => Scope::Admin,
        "use" => Scope::Use,
        "read" => Scope::Read,
        other => return Err(StoreError::Corrupt(format!("scope {other:?}"))),
    };
    Ok(KeyRow {
        id: row.try_get::<String, _>("id")?.parse().map_err(|e| StoreError::Corrupt(format!("{e}")))?,
        name: row.try_get("name")?,
        scope,
        hash: row.try_get("hash")?,
        created_at_ms: row.try_get("created_at_ms")?,
        last_used_at_ms: row.try_get("last_used_at_ms")?,
    })
}

async fn insert(conn: &mut SqliteConnection, row: &KeyRow) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO api_keys (id, name, scope, hash, created_at_ms) VALUES ($1, $2, $3, $4, $5)")
        .bind(row.id.as_str())
        .bind(&row.name)
        .bind(word(row.scope))
        .bind(&row.hash)
        .bind(row.created_at_ms)
        .execute(conn)
        .await?;
    Ok(())
}

impl Store {
    pub async fn insert_key(&self, row: KeyRow) -> Result<(), StoreError> {
        self.writer.write(move |c| Box::pin(async move { insert(c, &row).await })).await
    }

    pub async fn insert_key_once(&self, row: KeyRow, key: IdempotencyKey) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    idempotency::insert(c, &key, Some(row.id.as_str()), row.created_at_ms).await?;
                    insert(c, &row).await
                })
            })
            .await
    }

    pub async fn key_by_hash(&self, hash: &str) -> Result<Option<KeyRow>, StoreError> {
        let row =
            sqlx::query("SELECT * FROM api_keys WHERE hash = $1").bind(hash).fetch_optional(&self.readers).await?;
        row.as_ref().map(parse).transpose()
    }

    pub async fn key(&self, id: &KeyId) -> Result<Option<KeyRow>, StoreError> {
        let row =
            sqlx::query("SELECT * FROM api_keys WHERE id = $1").bind(id.as_str()).fetch_optional(&self.readers).await?;
        row.as_ref().map(parse).transpose()
    }

    pub async fn keys(&self) -> Result<Vec<KeyRow>, StoreError> {
        let rows = sqlx::query("SELECT * FROM api_keys ORDER BY id LIMIT 10000").fetch_all(&self.readers).await?;
        rows.iter().map(parse).collect()
    }

    pub async fn has_admin_key(&self) -> Result<bool, StoreError> {
        let count: i64 =
            sqlx::query_scalar("SELECT count(*) FROM api_keys WHERE scope = 'admin'").fetch_one(&self.readers).await?;
        Ok(count > 0)
    }

    /// True when there was one. The last admin key stays: without it nobody could make another.
    pub async fn revoke_key(&self, id: KeyId) -> Result<bool, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let done =
                        sqlx::query("DELETE FROM api_keys WHERE id = $1").bind(id.as_str()).execute(&mut *c).await?;
                    let left: i64 =
                        sqlx::query_scalar("SELECT count(*) FROM api_keys WHERE scope = 'admin'").fetch_one(c).await?;
                    if left == 0 {
                        return Err(StoreError::LastAdminKey);
                    }
                    Ok(done.rows_affected() == 1)
                })
            })
            .await
    }

    pub async fn touch_key(&self, id: KeyId, now_ms: i64) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    sqlx::query("UPDATE api_keys SET last_used_at_ms = $1 WHERE id = $2")
                        .bind(now_ms)
                        .bind(id.as_str())
                        .execute(c)
                        .await?;
                    Ok(())
                })
            })
            .await
    }
}
