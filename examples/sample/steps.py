def upper(row):
    return {"text": row["text"].upper()}
